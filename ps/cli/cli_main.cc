// SPDX-License-Identifier: Apache-2.0
// The `ballast` binary.

#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "ps/cli/tool.h"

int main(int argc, char** argv) {
  ballast::Surroundings surroundings;
  std::error_code error;
  const std::filesystem::path self =
      std::filesystem::read_symlink("/proc/self/exe", error);
  surroundings.binary_dir = self.parent_path().string();
  surroundings.terminal = isatty(STDOUT_FILENO) == 1;
  return ballast::RunTool(argc, argv, surroundings);
}
