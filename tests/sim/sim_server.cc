// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_server.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "rpc/bulk_message.h"

namespace ballast::sim {
namespace {

// As in ps/shard/shard_server.cc.
constexpr absl::Duration kIdleWait = absl::Milliseconds(50);
constexpr absl::Duration kLastReportMax = absl::Seconds(5);
// What a turn of the engine, a request of the disk and a sync take.
constexpr absl::Duration kTurnTime = absl::Microseconds(20);
constexpr absl::Duration kDiskMin = absl::Microseconds(30);
constexpr absl::Duration kDiskMax = absl::Milliseconds(3);

// The engine's end of a simulated stream.
class ServerStream final : public BulkStream {
 public:
  explicit ServerStream(std::shared_ptr<SimStream> stream)
      : stream_(std::move(stream)) {}
  void Read() override { stream_->ServerRead(); }
  void Write(const grpc::ByteBuffer& message) override {
    stream_->ServerWrite(message);
  }
  void Finish(const absl::Status& status) override {
    stream_->ServerFinish(status);
  }
  void Cancel() override {
    stream_->Break(absl::UnavailableError("the server broke it off"));
  }

 private:
  const std::shared_ptr<SimStream> stream_;
};

// The same of a stream that the engine has opened to another server.
class DialledStream final : public BulkStream {
 public:
  DialledStream(World* world, LifePointer life,
                std::shared_ptr<SimStream> stream,
                std::function<void()> written)
      : world_(*world),
        life_(std::move(life)),
        stream_(std::move(stream)),
        written_(std::move(written)) {}

  void set_take(std::function<void(const grpc::ByteBuffer&)> take) {
    take_ = std::move(take);
  }
  void Arrived(const grpc::ByteBuffer& message) {
    inbox_.push_back(message);
    Deliver();
  }
  void Read() override {
    reading_ = true;
    Deliver();
  }
  void Write(const grpc::ByteBuffer& message) override {
    stream_->ClientWrite(message);
    world_.After(absl::Microseconds(30), life_, written_);
  }
  void Finish(const absl::Status&) override { stream_->ClientHalfClose(); }
  void Cancel() override { stream_->ClientCancel(); }

 private:
  void Deliver() {
    if (reading_ && !inbox_.empty()) {
      reading_ = false;
      const grpc::ByteBuffer message = inbox_.front();
      inbox_.pop_front();
      take_(message);
    }
  }

  World& world_;
  const LifePointer life_;
  const std::shared_ptr<SimStream> stream_;
  const std::function<void()> written_;
  std::function<void(const grpc::ByteBuffer&)> take_;
  std::deque<grpc::ByteBuffer> inbox_;
  bool reading_ = false;
};

}  // namespace

SimServer::SimServer(const Options& options)
    : options_(options), mailbox_(std::make_shared<Mailbox>()) {
  ShardEngine::Options engine;
  engine.job = options_.own_job;
  engine.name = options_.life->name;
  engine.data_dir = options_.data_dir;
  engine.disk = options_.disk;
  engine.clock = [world = options_.world, life = options_.life] {
    return world->NowOf(*life);
  };
  engine.blocking = [this](std::function<void()> task) {
    RunBlocking(std::move(task));
  };
  engine.dialer = this;
  engine_ = std::make_unique<ShardEngine>(engine, mailbox_);
}

SimServer::~SimServer() {
  if (link_ != nullptr) {
    link_->Stop();
  }
  // The engine waits for what it gave away; on a stopped disk that fails.
  while (!blocking_.empty()) {
    const auto task = std::move(blocking_.front());
    blocking_.pop_front();
    task();
  }
  engine_.reset();
}

bool SimServer::Alive() {
  if (options_.sim_disk->stopped()) {
    options_.world->Kill(options_.life, Death::kPower);
  }
  return options_.life->alive;
}

void SimServer::Start() {
  const absl::Status opened = engine_->Open();
  if (!Alive()) {
    return;
  }
  if (!opened.ok()) {
    options_.exited(opened);
    return;
  }
  options_.network->Listen(options_.address, options_.life, this);
  Join();
  WatchTime();
}

void SimServer::Join() {
  MemberLink::Options link;
  link.join.set_role(v1::ROLE_SERVER);
  link.join.set_name(options_.life->name);
  link.join.set_address(options_.address);
  link.join.set_pid(static_cast<int64_t>(options_.life->number));
  link.join.set_host("sim");
  link.join.set_data_dir(options_.data_dir);
  v1::ConfigField* field = link.join.add_numerics();
  field->set_key("sim");
  field->set_value("1");
  engine_->FillJoin(&link.join);
  if (options_.world->tracing()) {
    v1::JoinRequest shown = link.join;
    shown.clear_layout();
    options_.world->Trace(absl::StrCat("joins: ", shown.ShortDebugString()));
  }
  link.silence_max = options_.job->job.cluster.give_up_after;
  link.on_admitted = [this](const v1::JoinReply& reply) {
    if (options_.world->tracing()) {
      options_.world->Trace(absl::StrCat("admitted ", reply.incarnation()));
    }
    started_ = true;
    const absl::Status status = engine_->Start(this);
    if (!Alive()) {
      return;
    }
    if (!status.ok()) {
      v1::ReportRequest request;
      request.set_timeline(reply.timeline());
      request.mutable_fatal()->set_code(static_cast<int32_t>(status.code()));
      request.mutable_fatal()->set_message(
          absl::StrCat(options_.life->name, ": ", status.message()));
      Post(std::move(request));
      over_ = true;
      WaitForFarewell(status, options_.world->now() + kLastReportMax);
      return;
    }
    StepSoon();
  };
  link.on_directive = [this](const v1::PollReply& reply) {
    if (options_.world->tracing()) {
      options_.world->Trace(absl::StrCat("directive ", reply.number(), " ",
                                         reply.server().ShortDebugString()));
    }
    engine_->Deliver(reply);
    StepSoon();
  };
  link.stats = [this] { return engine_->stats(); };
  link.on_end = [this](const absl::Status& why) {
    if (!started_) {
      over_ = true;
      options_.exited(why);
      return;
    }
    engine_->SessionOver(why);
    StepSoon();
  };
  link_ = std::make_shared<MemberLink>(options_.world, options_.network,
                                       options_.life, options_.coordinator,
                                       std::move(link));
  link_->Start();
}

void SimServer::Terminate() {
  if (started_ && !over_) {
    mailbox_->Post([this] { engine_->Drain("SIGTERM"); });
    StepSoon();
  }
}

void SimServer::Post(v1::ReportRequest request) {
  if (!Alive()) {
    return;
  }
  if (options_.world->tracing()) {
    v1::ReportRequest shown = request;
    shown.clear_state_digests();
    options_.world->Trace(absl::StrCat("reports ", shown.ShortDebugString()));
  }
  if (options_.posted) {
    options_.posted(request);
  }
  link_->Post(std::move(request));
}

void SimServer::AskPlacement(
    std::function<void(absl::StatusOr<v1::Placement>)> done) {
  if (Alive()) {
    link_->AskPlacement([this, done = std::move(done)](
                            const absl::StatusOr<v1::Placement>& placement) {
      done(placement);
      StepSoon();
    });
  }
}

void SimServer::Accept(int kind, std::shared_ptr<SimStream> stream) {
  BulkStreamHandler* handler = kind == kFetchStream  ? engine_->fetch()
                               : kind == kPushStream ? engine_->push()
                                                     : engine_->replicate();
  const uint64_t id = next_stream_++;
  auto end = std::make_shared<ServerStream>(stream);
  mailbox_->Post([handler, id, end] { handler->OnOpen(id, end); });
  SimStream::ServerEvents events;
  events.on_message = [this, handler, id](const grpc::ByteBuffer& buffer) {
    auto message = std::make_shared<absl::StatusOr<BulkMessage>>(
        BulkMessage::Parse(buffer));
    mailbox_->Post([handler, id, message] {
      handler->OnMessage(id, std::move(*message));
    });
    StepSoon();
  };
  events.on_half_close = [this, handler, id] {
    mailbox_->Post([handler, id] { handler->OnHalfClose(id); });
    StepSoon();
  };
  events.on_written = [this, handler, id] {
    mailbox_->Post([handler, id] { handler->OnWritten(id); });
    StepSoon();
  };
  events.on_gone = [this, handler, id] {
    mailbox_->Post([handler, id] { handler->OnGone(id); });
    StepSoon();
  };
  stream->set_server_events(std::move(events));
  stream->ServerRead();
  StepSoon();
}

void SimServer::Dial(const std::string& address, uint64_t id,
                     BulkStreamHandler* handler) {
  auto stream =
      options_.network->Open(options_.life, address, kReplicateStream);
  auto end = std::make_shared<DialledStream>(
      options_.world, options_.life, stream, [this, handler, id] {
        mailbox_->Post([handler, id] { handler->OnWritten(id); });
        StepSoon();
      });
  end->set_take([this, handler, id](const grpc::ByteBuffer& buffer) {
    auto message = std::make_shared<absl::StatusOr<BulkMessage>>(
        BulkMessage::Parse(buffer));
    mailbox_->Post([handler, id, message] {
      handler->OnMessage(id, std::move(*message));
    });
    StepSoon();
  });
  mailbox_->Post([handler, id, end] { handler->OnOpen(id, end); });
  end->Read();  // As gRPC's shell does.
  stream->set_client_events(
      {[end](const grpc::ByteBuffer& buffer) { end->Arrived(buffer); },
       [this, handler, id](const absl::Status&) {
         mailbox_->Post([handler, id] { handler->OnGone(id); });
         StepSoon();
       }});
  StepSoon();
}

void SimServer::StepSoon() {
  if (step_scheduled_ || !started_ || over_) {
    return;
  }
  step_scheduled_ = true;
  options_.world->After(kTurnTime, options_.life, [this] {
    step_scheduled_ = false;
    Step();
  });
}

void SimServer::Step() {
  if (over_) {
    return;
  }
  const bool more = engine_->Step();
  if (!Alive()) {
    return;
  }
  PumpSoon();
  if (engine_->over()) {
    SayFarewell();
  } else if (more) {
    StepSoon();
  }
}

void SimServer::WatchTime() {
  options_.world->After(kIdleWait, options_.life, [this] {
    StepSoon();
    WatchTime();
  });
}

void SimServer::PumpSoon() {
  if (pump_scheduled_ || options_.sim_disk->pending() == 0) {
    return;
  }
  pump_scheduled_ = true;
  options_.world->After(
      options_.world->random().Scaled(kDiskMin, kDiskMax), options_.life,
      [this] {
        pump_scheduled_ = false;
        const uint64_t count = options_.world->random().Between(1, 4);
        for (uint64_t i = 0; i < count && options_.sim_disk->PumpOne(); ++i) {
        }
        if (Alive()) {
          StepSoon();
          PumpSoon();
        }
      });
}

void SimServer::RunBlocking(std::function<void()> task) {
  blocking_.push_back(std::move(task));
  BlockingSoon();
}

void SimServer::BlockingSoon() {
  if (blocking_scheduled_ || blocking_.empty()) {
    return;
  }
  blocking_scheduled_ = true;
  options_.world->After(options_.world->random().Scaled(kDiskMin, kDiskMax * 5),
                        options_.life, [this] {
                          blocking_scheduled_ = false;
                          const auto task = std::move(blocking_.front());
                          blocking_.pop_front();
                          task();
                          if (Alive()) {
                            StepSoon();
                            BlockingSoon();
                          }
                        });
}

void SimServer::SayFarewell() {
  over_ = true;
  if (auto report = engine_->LastReport()) {
    Post(*std::move(report));
  }
  if (options_.life->alive) {
    WaitForFarewell(engine_->failure(), options_.world->now() + kLastReportMax);
  }
}

void SimServer::WaitForFarewell(const absl::Status& status,
                                absl::Time deadline) {
  if (link_->over() || link_->queued() == 0 ||
      options_.world->now() >= deadline) {
    options_.exited(status);
    return;
  }
  options_.world->After(
      absl::Milliseconds(20), options_.life,
      [this, status, deadline] { WaitForFarewell(status, deadline); });
}

}  // namespace ballast::sim
