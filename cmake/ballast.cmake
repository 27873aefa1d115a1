# SPDX-License-Identifier: Apache-2.0
# Options, packages and the four functions that every folder's CMakeLists uses.

option(BALLAST_TESTS "Build tests and benchmarks" ON)
option(BALLAST_WERROR "Warnings are errors" OFF)
set(BALLAST_SANITIZE "" CACHE STRING "address,undefined or thread")

find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
      CCACHE_NOHASHDIR=1 ${CCACHE})
endif()

find_package(Threads REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(absl REQUIRED)
find_package(RocksDB CONFIG REQUIRED)
# Debian's dnnl-config.cmake asks for OpenCL, which its library does not need.
find_library(DNNL_LIBRARY dnnl REQUIRED)
add_library(dnnl_cpu INTERFACE)
target_link_libraries(dnnl_cpu INTERFACE ${DNNL_LIBRARY})
find_package(yaml-cpp REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(uring REQUIRED IMPORTED_TARGET liburing)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(hwy REQUIRED IMPORTED_TARGET libhwy)

add_library(ballast_options INTERFACE)
target_compile_features(ballast_options INTERFACE cxx_std_20)
target_include_directories(ballast_options INTERFACE ${PROJECT_SOURCE_DIR})
# Generated headers need not meet our warnings.
target_include_directories(ballast_options SYSTEM INTERFACE
                           ${PROJECT_BINARY_DIR})
# One formula, one result: the compiler may not fuse a multiply and an add
# where the source does not say so (docs/PROTOCOL.md, section 8).
target_compile_options(ballast_options INTERFACE
  -ffp-contract=off -Wall -Wextra -Wshadow -Wconversion -Wnon-virtual-dtor
  -Wold-style-cast -Wextra-semi
  $<$<BOOL:${BALLAST_WERROR}>:-Werror>
  $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>)
target_link_libraries(ballast_options INTERFACE Threads::Threads)
if(BALLAST_SANITIZE)
  target_compile_options(ballast_options INTERFACE
    -fsanitize=${BALLAST_SANITIZE} -fno-sanitize-recover=all
    -fno-omit-frame-pointer)
  target_link_options(ballast_options INTERFACE
    -fsanitize=${BALLAST_SANITIZE})
else()
  find_program(MOLD mold)
  if(MOLD)
    target_link_options(ballast_options INTERFACE -fuse-ld=mold)
  endif()
endif()

# ballast_library(NAME SRCS a.cc ... DEPS target ...)
function(ballast_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SRCS})
  target_link_libraries(${name} PUBLIC ballast_options ${ARG_DEPS})
endfunction()

# ballast_binary(NAME SRCS x_main.cc ... DEPS target ...)
function(ballast_binary name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE ballast_options ${ARG_DEPS})
endfunction()

# ballast_test(NAME SRCS x_test.cc ... DEPS target ... LABELS unit
#              [TIMEOUT seconds] [DATA argument ...])
# LABELS is one of unit, grpc, integration, golden.
function(ballast_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SRCS;DEPS;LABELS;DATA" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 60)
  endif()
  find_package(GTest REQUIRED)
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE ballast_options ${ARG_DEPS}
                        GTest::gmock GTest::gtest_main)
  set_target_properties(${name} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests_bin)
  add_test(NAME ${name} COMMAND ${name} ${ARG_DATA})
  set_tests_properties(${name} PROPERTIES
    LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
endfunction()

# ballast_bench(NAME SRCS x_bench.cc ... DEPS target ...)
function(ballast_bench name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  find_package(benchmark REQUIRED)
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE ballast_options ${ARG_DEPS}
                        benchmark::benchmark_main)
endfunction()
