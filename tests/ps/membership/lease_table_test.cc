// SPDX-License-Identifier: Apache-2.0
#include "ps/membership/lease_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr absl::Duration kLease = absl::Seconds(5);

TEST(LeaseTableTest, ExpiresOnlyMembersSilentForAWholeLease) {
  const absl::Time start = absl::UnixEpoch();
  LeaseTable leases(kLease);
  leases.Renew(1, start);
  leases.Renew(2, start + absl::Seconds(3));

  EXPECT_THAT(leases.TakeExpired(start + kLease - absl::Nanoseconds(1)),
              IsEmpty());
  EXPECT_THAT(leases.TakeExpired(start + kLease), ElementsAre(1));
}

TEST(LeaseTableTest, NamesAnExpiredMemberOnce) {
  LeaseTable leases(kLease);
  leases.Renew(7, absl::UnixEpoch());
  EXPECT_THAT(leases.TakeExpired(absl::UnixEpoch() + kLease), ElementsAre(7));
  EXPECT_THAT(leases.TakeExpired(absl::UnixEpoch() + 2 * kLease), IsEmpty());
}

TEST(LeaseTableTest, ALateHeartbeatDoesNotShortenALease) {
  const absl::Time start = absl::UnixEpoch();
  LeaseTable leases(kLease);
  leases.Renew(1, start + absl::Seconds(4));
  leases.Renew(1, start);
  EXPECT_THAT(leases.TakeExpired(start + kLease), IsEmpty());
  EXPECT_EQ(leases.Silence(1, start + absl::Seconds(6)), absl::Seconds(2));
}

TEST(LeaseTableTest, ARemovedMemberNeverExpires) {
  LeaseTable leases(kLease);
  leases.Renew(1, absl::UnixEpoch());
  leases.Remove(1);
  leases.Remove(2);
  EXPECT_THAT(leases.TakeExpired(absl::UnixEpoch() + kLease), IsEmpty());
  EXPECT_EQ(leases.Silence(1, absl::UnixEpoch() + kLease),
            absl::ZeroDuration());
}

}  // namespace
}  // namespace ballast
