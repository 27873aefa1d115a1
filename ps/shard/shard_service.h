// SPDX-License-Identifier: Apache-2.0
// The gRPC face of a shard server: raw streams whose events go to the
// engine's mailbox. gRPC's threads parse a header and nothing more.

#pragma once

#include <grpcpp/impl/codegen/service_type.h>

#include <memory>

#include "ps/shard/bulk_stream.h"
#include "ps/shard/mailbox.h"

namespace ballast {

// The handlers are called on the thread that runs `mailbox`; they must live
// until the server that runs the service is stopped and the mailbox closed.
std::unique_ptr<grpc::Service> MakeShardService(
    std::shared_ptr<Mailbox> mailbox, BulkStreamHandler* fetch,
    BulkStreamHandler* push, BulkStreamHandler* replicate);

}  // namespace ballast
