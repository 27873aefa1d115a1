// SPDX-License-Identifier: Apache-2.0
// Preloaded into a role by the stress tests: while the file named by
// BALLAST_EIO_SWITCH exists, writes and syncs of files below the folder that it
// contains fail with EIO. There is no io_uring under it, so that every transfer
// passes here.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int Fails(int fd) {
  const char* const name = getenv("BALLAST_EIO_SWITCH");
  if (name == NULL || access(name, F_OK) != 0) {
    return 0;
  }
  char folder[512] = {0};
  FILE* const file = fopen(name, "re");
  if (file == NULL) {
    return 0;
  }
  const size_t length = fread(folder, 1, sizeof(folder) - 1, file);
  fclose(file);
  char link[64];
  char path[1024] = {0};
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  return length > 0 && readlink(link, path, sizeof(path) - 1) > 0 &&
         strncmp(path, folder, length) == 0;
}

int io_uring_queue_init(unsigned entries, void* ring, unsigned flags) {
  (void)entries;
  (void)ring;
  (void)flags;
  return -ENOSYS;
}

int io_uring_queue_init_params(unsigned entries, void* ring, void* params) {
  (void)entries;
  (void)ring;
  (void)params;
  return -ENOSYS;
}

ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) {
  static ssize_t (*real)(int, const void*, size_t, off64_t);
  if (real == NULL) {
    real = dlsym(RTLD_NEXT, "pwrite64");
  }
  if (Fails(fd)) {
    errno = EIO;
    return -1;
  }
  return real(fd, data, bytes, offset);
}

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  return pwrite64(fd, data, bytes, offset);
}

int fdatasync(int fd) {
  static int (*real)(int);
  if (real == NULL) {
    real = dlsym(RTLD_NEXT, "fdatasync");
  }
  if (Fails(fd)) {
    errno = EIO;
    return -1;
  }
  return real(fd);
}
