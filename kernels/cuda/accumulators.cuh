// Operands of a product's sums in PTX: NAMES_n lists %0 to %(n-1), BIND_n binds n elements of an array from `at` on.

#pragma once

#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_12 NAMES_8 ", %8, %9, %10, %11"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define BIND_4(d, at) "+f"(d[at]), "+f"(d[at + 1]), "+f"(d[at + 2]), "+f"(d[at + 3])
#define BIND_8(d, at) BIND_4(d, at), BIND_4(d, at + 4)
#define BIND_12(d, at) BIND_8(d, at), BIND_4(d, at + 8)
#define BIND_16(d, at) BIND_8(d, at), BIND_8(d, at + 8)
#define BIND_24(d, at) BIND_16(d, at), BIND_8(d, at + 16)
#define BIND_32(d, at) BIND_16(d, at), BIND_16(d, at + 16)
#define BIND_48(d, at) BIND_32(d, at), BIND_16(d, at + 32)
#define BIND_64(d, at) BIND_32(d, at), BIND_32(d, at + 32)
