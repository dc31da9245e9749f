# Links for an older glibc than this machine's (FLASHKDA_GLIBC): g++ and nvcc compile as ever, zig
# (Python package ziglang) links, against its stubs of that glibc. Not -static-libstdc++, which needs
# the newest glibc of all; not zig's libc++ either: exceptions cross into libtorch.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
execute_process(COMMAND ${Python_EXECUTABLE} -m ziglang version
                OUTPUT_VARIABLE FLASHKDA_ZIG_VERSION ERROR_QUIET RESULT_VARIABLE status
                OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "flashkda: FLASHKDA_GLIBC=${FLASHKDA_GLIBC} needs zig: pip install ziglang, \
or leave the option out to link for this machine's own glibc")
endif()

set(runtimes)
foreach(name IN ITEMS libstdc++.so.6 libgcc_s.so.1)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${name}
                  OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT IS_ABSOLUTE "${path}")
    message(FATAL_ERROR "flashkda: ${CMAKE_CXX_COMPILER} has no ${name}")
  endif()
  string(APPEND runtimes " \"${path}\"")
endforeach()
set(CMAKE_CXX_CREATE_SHARED_LIBRARY
    "\"${Python_EXECUTABLE}\" -m ziglang cc -target ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.${FLASHKDA_GLIBC} \
-shared <LINK_FLAGS> <SONAME_FLAG><TARGET_SONAME> -o <TARGET> <OBJECTS> <LINK_LIBRARIES> ${runtimes}")
message(STATUS "flashkda: zig ${FLASHKDA_ZIG_VERSION} links for glibc ${FLASHKDA_GLIBC}")
