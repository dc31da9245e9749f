// Linked in for an older glibc (cmake/portable_link.cmake): what g++'s headers ask of a newer libstdc++ or
// glibc, defined here and seen by nobody else.

#include <sstream>
#include <string>

// glibc 2.32: shared_ptr counts without atomics while it is set. Never setting it is always right.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

// libstdc++ of gcc 9 (GLIBCXX_3.4.26) and of gcc 11 (3.4.29).
template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringstream<char>::basic_stringstream();
template std::string std::basic_stringbuf<char>::str() const&;
template std::string std::basic_stringbuf<char>::str() &&;
