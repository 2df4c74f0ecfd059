// Numbers of 8 and 16 bits: e4m3, bf16 and float16, rounded to nearest even.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "threads.h"

namespace cuda {

template <class To, class From>
inline To bits(From from) {
  To to{};
  memcpy(&to, &from, std::min(sizeof to, sizeof from));
  return to;
}

inline float of_bf16(u16 code) { return bits<float>((u32)code << 16); }
inline u16 to_bf16(float value) {
  u32 word = bits<u32>(value);
  return value != value ? 0x7FFF : (word + 0x7FFF + (word >> 16 & 1)) >> 16;
}

inline float of_f16(u16 code) { return (float)bits<_Float16>(code); }
inline u16 to_f16(float value) { return bits<u16>((_Float16)value); }

inline float decoded_e4m3(u8 code) {
  int exponent = code >> 3 & 15, fraction = code & 7;
  float value = (code & 127) == 127 ? NAN : exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
  return code & 128 ? -value : value;
}
struct E4m3Values {
  float value[256];
  E4m3Values() {
    for (int code = 0; code < 256; code++) value[code] = decoded_e4m3(code);
  }
};
inline E4m3Values e4m3_values;
inline float of_e4m3(u8 code) { return e4m3_values.value[code]; }

// Saturates.
inline u8 to_e4m3(float value) {
  if (value != value) return 127;
  u8 sign = std::signbit(value) ? 128 : 0;
  float size = fabsf(value);
  if (size >= 448) return sign | 126;
  int exponent = size < ldexpf(1, -6) ? -6 : ilogbf(size);
  int steps = (int)nearbyintf(ldexpf(size, 3 - exponent));
  // A carry goes into the exponent by itself.
  return sign | ((exponent + 6) * 8 + steps);
}

}  // namespace cuda
