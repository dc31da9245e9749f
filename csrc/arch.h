// What tells architectures apart. All run the same sources but for scan, which has a form of its own where
// there is wgmma.
#pragma once

namespace flashkda {

struct Sm90 {
  static constexpr char const* kVariant = "hopper";
  static constexpr int kMajor = 9, kMinor = 0;
  static constexpr int kSharedMemory = 227 * 1024;  // of a CTA, at most
  static constexpr bool kHasWgmma = true;
};
struct Sm100 {
  static constexpr char const* kVariant = "blackwell";
  static constexpr int kMajor = 10, kMinor = 0;
  static constexpr int kSharedMemory = 227 * 1024;  // of a CTA, at most
  static constexpr bool kHasWgmma = false;
};
struct Sm103 {
  static constexpr char const* kVariant = "blackwell";
  static constexpr int kMajor = 10, kMinor = 3;
  static constexpr int kSharedMemory = 227 * 1024;  // of a CTA, at most
  static constexpr bool kHasWgmma = false;
};
struct Sm120 {
  static constexpr char const* kVariant = "blackwell";
  static constexpr int kMajor = 12, kMinor = 0;
  static constexpr int kSharedMemory = 99 * 1024;  // of a CTA, at most
  static constexpr bool kHasWgmma = false;
};

}  // namespace flashkda
