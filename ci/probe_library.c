// Loads libflashkda_cuda.so as a process without Python does, and prints what it says of itself.

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

int main(int argc, char** argv) {
  void* library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
  if (library == NULL) {
    fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "usage: probe LIBRARY");
    return 1;
  }
  int (*abi)(void) = dlsym(library, "flashkda_abi");
  char const* (*build_info)(void) = dlsym(library, "flashkda_build_info");
  char const* (*probe)(int, char*, size_t) = dlsym(library, "flashkda_probe");
  if (abi == NULL || build_info == NULL || probe == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  char reason[512] = "";
  char const* variant = probe(0, reason, sizeof reason);
  printf("ABI %d\nbuild %s\ndevice 0: %s\n", abi(), build_info(), variant != NULL ? variant : reason);
  return 0;
}
