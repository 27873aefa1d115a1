// SPDX-License-Identifier: Apache-2.0
// ballast-sim: whole clusters in one thread on virtual time, a seed each.
// Exit 0 all promises held, 1 one was broken, 2 usage.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "common/rule.h"
#include "tests/sim/cluster.h"
#include "tests/sim/rule_names.h"

namespace ballast::sim {
namespace {

constexpr int kViolated = 1;
constexpr int kUsage = 2;

struct Arguments {
  std::string seeds = "1..100";
  std::string broken_rule;
  uint32_t threads = 2;
  uint32_t lines = 200;
  bool calm = false;
  bool verbose = false;
  bool keep_going = false;
};

struct Totals {
  std::mutex mutex;
  uint64_t seeds = 0;
  uint64_t steps = 0;
  uint64_t events = 0;
  std::map<std::string, uint64_t> faults;
  std::vector<uint64_t> failed;
};

bool ParseSeeds(const std::string& text, uint64_t* first, uint64_t* last) {
  const std::vector<std::string> parts = absl::StrSplit(text, "..");
  if (parts.size() > 2 || !absl::SimpleAtoi(parts[0], first)) {
    return false;
  }
  *last = *first;
  return (parts.size() == 1 || absl::SimpleAtoi(parts[1], last)) &&
         *first <= *last;
}

// The seed once more, with its last events.
void Explain(const Arguments& arguments, uint64_t seed) {
  const SimResult result =
      RunSeed({.seed = seed, .calm = arguments.calm, .tracing = true});
  std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed),
              result.summary.c_str());
  const size_t skipped = result.trace.size() -
                         std::min<size_t>(result.trace.size(), arguments.lines);
  for (size_t i = skipped; i < result.trace.size(); ++i) {
    std::printf("  %s\n", result.trace[i].c_str());
  }
  std::printf("seed %llu: oracle '%s': %s\n",
              static_cast<unsigned long long>(seed), result.oracle.c_str(),
              result.violation.c_str());
}

int Run(const Arguments& arguments) {
  uint64_t first = 0;
  uint64_t last = 0;
  Rule rule = Rule::kNone;
  if (!ParseSeeds(arguments.seeds, &first, &last)) {
    std::fprintf(stderr, "ballast-sim: --seeds is '%s'; want A or A..B\n",
                 arguments.seeds.c_str());
    return kUsage;
  }
  if (!arguments.broken_rule.empty()) {
    rule = RuleOfName(arguments.broken_rule);
    if (rule == Rule::kNone) {
      std::fprintf(stderr,
                   "ballast-sim: --break is '%s'; want a name of "
                   "common/rule.h\n",
                   arguments.broken_rule.c_str());
      return kUsage;
    }
  }
  std::printf("seeds %s\n", arguments.seeds.c_str());
  std::fflush(stdout);
  const auto began = std::chrono::steady_clock::now();
  std::atomic<uint64_t> next = first;
  std::atomic<bool> stop = false;
  Totals totals;
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < arguments.threads; ++i) {
    threads.emplace_back([&] {
      broken_rule = rule;
      while (!stop) {
        const uint64_t seed = next.fetch_add(1);
        if (seed > last) {
          return;
        }
        const SimResult result =
            RunSeed({.seed = seed, .calm = arguments.calm});
        const std::lock_guard<std::mutex> lock(totals.mutex);
        ++totals.seeds;
        totals.steps += result.steps;
        totals.events += result.events;
        for (const auto& [fault, count] : result.faults) {
          totals.faults[fault] += count;
        }
        if (arguments.verbose || !result.oracle.empty()) {
          std::printf("seed %llu: %s%s%s\n",
                      static_cast<unsigned long long>(seed),
                      result.summary.c_str(),
                      result.oracle.empty() ? "" : "; VIOLATED ",
                      result.oracle.c_str());
          std::fflush(stdout);
        }
        if (!result.oracle.empty()) {
          totals.failed.push_back(seed);
          stop = stop || !arguments.keep_going;
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - began)
          .count();
  broken_rule = rule;
  if (!totals.failed.empty()) {
    Explain(arguments,
            *std::min_element(totals.failed.begin(), totals.failed.end()));
  }
  std::printf(
      "%llu seeds, %zu violated; %.0f seeds/minute, %llu steps, "
      "%llu events\n",
      static_cast<unsigned long long>(totals.seeds), totals.failed.size(),
      static_cast<double>(totals.seeds) / seconds * 60.0,
      static_cast<unsigned long long>(totals.steps),
      static_cast<unsigned long long>(totals.events));
  for (const auto& [fault, count] : totals.faults) {
    std::printf("  %8llu %s\n", static_cast<unsigned long long>(count),
                fault.c_str());
  }
  return totals.failed.empty() ? 0 : kViolated;
}

}  // namespace
}  // namespace ballast::sim

// NOLINTNEXTLINE(bugprone-exception-escape): a wrong flag name of ours throws.
int main(int argc, char** argv) {
  CLI::App app(
      "ballast-sim - runs the coordinator, shard servers and workers of whole "
      "clusters\nin one thread on virtual time, from one seed each, does "
      "things "
      "to them, and\nholds what they commit against an undisturbed run.");
  app.footer(
      "Exit codes: 0 all held, 1 violated, 2 usage.\n"
      "Example: ballast-sim --seeds 1..5000");
  ballast::sim::Arguments arguments;
  app.add_option("--seeds", arguments.seeds, "A or A..B, both included");
  app.add_option("--break", arguments.broken_rule,
                 "A rule of common/rule.h that shall not hold");
  app.add_option("--threads", arguments.threads, "Seeds at the same time");
  app.add_option("--lines", arguments.lines, "Last events of a violated seed");
  app.add_flag("--calm", arguments.calm, "No faults");
  app.add_flag("--verbose", arguments.verbose, "A line for every seed");
  app.add_flag("--keep-going", arguments.keep_going,
               "Run the other seeds too after a violation");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : ballast::sim::kUsage;
  }
  return ballast::sim::Run(arguments);
}
