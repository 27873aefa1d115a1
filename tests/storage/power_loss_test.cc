// SPDX-License-Identifier: Apache-2.0
// A shard server's storage, cut at every write and every sync. After each cut
// it recovers to the last vote that it gave; and that this test notices a
// missing sync is tested too, by taking out every kind of them in turn.

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "tests/storage/scripted_server.h"
#include "tests/testing/sim_disk.h"

namespace ballast::testing {
namespace {

constexpr char kDir[] = "/data/server-0";
constexpr uint64_t kVersions = 8;

// What a sync is for, whatever its file is called: its place in the code.
std::string KindOf(const SimDisk::Sync& sync) {
  std::string path = sync.path;
  const size_t segment = path.find("/segment-");
  if (segment != std::string::npos) {
    path.resize(segment + 8);
  }
  std::string kind = absl::StrCat(path, sync.wrote ? "" : " on open");
  if (sync.of == SimDisk::Sync::Of::kFolder && sync.wrote) {
    std::string newest = sync.newest;
    const size_t name = newest.find("/segment-");
    absl::StrAppend(&kind, " after ", newest.substr(0, name));
  }
  return kind;
}

class Machine {
 public:
  Machine(uint64_t seed, const std::string& skipped) : disk_(seed) {
    if (!skipped.empty()) {
      disk_.SkipSyncs([skipped](const SimDisk::Sync& sync) {
        return KindOf(sync) == skipped;
      });
    }
  }

  // One life: recover, then go on to version `until`. Errors while the machine
  // is on are what the rules say is wrong.
  absl::Status Live(uint64_t until) {
    ScriptedServer server(&disk_, kDir, &promises_,
                          [this](const std::function<bool()>& done) {
                            while (!done() && disk_.PumpOne()) {
                            }
                          });
    absl::Status status = server.Recover();
    if (status.ok()) {
      status = server.Run(until);
    }
    return disk_.stopped() ? absl::OkStatus() : status;
  }
  void End(SimDisk::End end) {
    disk_.Stop();
    disk_.Restart(end);
  }
  SimDisk* disk() { return &disk_; }
  const Promises& promises() const { return promises_; }

 private:
  SimDisk disk_;
  Promises promises_;
};

// How the story goes on after the first cut.
enum class Then { kPower, kKillTellPower, kKillRunPower };

// The n-th change of the script does not end; `reached` says whether there is
// one.
absl::Status CutAt(uint64_t n, Then then, uint64_t seed,
                   const std::string& skipped, bool* reached) {
  Machine machine(seed, skipped);
  machine.disk()->CutAfter(n);
  BALLAST_RETURN_IF_ERROR(machine.Live(kVersions));
  *reached = machine.disk()->stopped();
  if (then == Then::kPower) {
    machine.End(SimDisk::End::kPower);
  } else {
    machine.End(SimDisk::End::kKill);
    // What it recovers to is told to others, as if it were still there.
    const uint64_t until =
        then == Then::kKillRunPower ? machine.promises().vote + 4 : 0;
    BALLAST_RETURN_IF_ERROR(machine.Live(until));
    machine.End(SimDisk::End::kPower);
  }
  BALLAST_RETURN_IF_ERROR(machine.Live(kVersions + 4));
  machine.End(SimDisk::End::kPower);
  return machine.Live(0);
}

constexpr Then kStories[] = {Then::kPower, Then::kKillTellPower,
                             Then::kKillRunPower};

// The first failure, with its place; OK when every cut is survived.
absl::Status CutEverywhere(const std::string& skipped, uint64_t seeds,
                           uint64_t* cuts) {
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    for (const Then then : kStories) {
      bool reached = true;
      for (uint64_t n = 1; reached; ++n, ++*cuts) {
        const absl::Status status =
            CutAt(n, then, seed * 1000 + n, skipped, &reached);
        if (!status.ok()) {
          return absl::Status(
              status.code(),
              absl::StrCat("change ", n, ", story ", static_cast<int>(then),
                           ", seed ", seed * 1000 + n, ": ", status.message()));
        }
      }
    }
  }
  return absl::OkStatus();
}

TEST(PowerLossTest, EveryCutIsSurvivedToTheLastVote) {
  uint64_t cuts = 0;
  EXPECT_EQ(CutEverywhere("", 8, &cuts), absl::OkStatus());
  std::printf("%llu cuts\n", static_cast<unsigned long long>(cuts));
  EXPECT_GT(cuts, 2000u);
}

// Every kind of sync that the server's life has, from a script that ends in a
// kill and a second life.
std::set<std::string> KindsOfSyncs() {
  std::set<std::string> kinds;
  Machine machine(1, "");
  machine.disk()->OnSync(
      [&kinds](const SimDisk::Sync& sync) { kinds.insert(KindOf(sync)); });
  EXPECT_EQ(machine.Live(kVersions), absl::OkStatus());
  machine.End(SimDisk::End::kKill);
  EXPECT_EQ(machine.Live(kVersions + 1), absl::OkStatus());
  return kinds;
}

TEST(PowerLossTest, TakingOutAnySyncIsNoticed) {
  const std::set<std::string> kinds = KindsOfSyncs();
  EXPECT_GE(kinds.size(), 10u);
  for (const std::string& kind : kinds) {
    uint64_t cuts = 0;
    const absl::Status status = CutEverywhere(kind, 40, &cuts);
    EXPECT_FALSE(status.ok()) << kind << " is not needed, or this test does "
                              << "not see it";
    std::printf("%-40s %6llu cuts: %s\n", kind.c_str(),
                static_cast<unsigned long long>(cuts),
                std::string(status.message()).c_str());
  }
}

}  // namespace
}  // namespace ballast::testing
