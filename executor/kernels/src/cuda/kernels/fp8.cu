// Quantisation to fp8 and back. A matrix is scaled by the largest power of two with which its
// largest magnitude fits the format. It is written as it is stored, transposed, or both. Decoding
// serves devices without fp8 products.
//
// Formats: 0 is E4M3, 1 is E5M2. A code is the byte of an fp8 number.

struct Fp8Format {
    // Fraction bits, exponent bias, code and exponent of the largest number.
    int fraction, bias, largest, largest_exponent;
};
__device__ __forceinline__ Fp8Format fp8_format(index format) {
    Fp8Format form;
    form.fraction = format == 0 ? 3 : 2;
    form.bias = format == 0 ? 7 : 15;
    form.largest = format == 0 ? 0x7E : 0x7B;
    form.largest_exponent = format == 0 ? 8 : 15;
    return form;
}

// Returns the code of the nearest number, ties to even. Larger magnitudes saturate.
__device__ __forceinline__ word nearest_code(float x, Fp8Format form) {
    const word bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7FFFFFFF;
    const int shift = 23 - form.fraction;
    // A float whose last place is the format's smallest number: adding it rounds to that place.
    const word ruler = (word)(127 + 24 - form.bias - form.fraction) << 23;
    const word subnormal = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(ruler)) - ruler;
    const word rebased = magnitude - ((word)(127 - form.bias) << 23);
    const word rounded = (rebased + ((1u << (shift - 1)) - 1) + (rebased >> shift & 1)) >> shift;
    const word normal = rounded < (word)form.largest ? rounded : (word)form.largest;
    const word code = magnitude >= (word)(128 - form.bias) << 23 ? normal : subnormal;
    return magnitude > 0x7F800000 ? 0x7F : sign | code;
}

// Returns two codes, the second in the upper byte. Ada and later have an instruction for it.
__device__ __forceinline__ word nearest_codes(float first, float second, index format) {
#if !defined(FORETELL_EMULATED) && __CUDA_ARCH__ >= 890
    unsigned short codes;
    if (format == 0) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    }
    return codes;
#else
    return nearest_code(first, fp8_format(format)) | nearest_code(second, fp8_format(format)) << 8;
#endif
}

// Returns the number of a code.
__device__ __forceinline__ float decode(word code, index format) {
    if (format == 1) {
        // E5M2 is the upper half of fp16.
        const fp16 wider = {(unsigned short)(code << 8)};
        return widen(wider);
    }
    if ((code & 0x7F) == 0x7F) {
        return __uint_as_float(0x7FC00000);
    }
    return __uint_as_float((code & 0x80) << 24 | (code & 0x7F) << 20) * __uint_as_float((127u + 120) << 23);
}

// The maximum over all threads of a block; every thread gets it.
__device__ word block_largest(word x) {
    __shared__ word parts[8];
    for (int apart = 16; apart > 0; apart /= 2) {
        const word other = __shfl_xor_sync(0xFFFFFFFFu, x, apart);
        x = x < other ? other : x;
    }
    if (threadIdx.x % 32 == 0) {
        parts[threadIdx.x / 32] = x;
    }
    __syncthreads();
    word largest = parts[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; warp++) {
        largest = largest < parts[warp] ? parts[warp] : largest;
    }
    return largest;
}

// The bits of each block's largest magnitude, to scratch memory. sizes: elements
KERNEL(largest_magnitudes) {
    const number *x = read<number>(arguments, 0);
    const index width = 16 / sizeof(number), elements = arguments.sizes[0];
    const index packs = (long_word)x % 16 == 0 ? elements / width : 0;
    word largest = 0;
    for (index pack = thread_index(); pack < packs; pack += thread_count()) {
        const Pack given = ((const Pack *)x)[pack];
#pragma unroll
        for (int i = 0; i < (int)width; i++) {
            const word magnitude = __float_as_uint(widen(given.numbers[i])) & 0x7FFFFFFF;
            largest = largest < magnitude ? magnitude : largest;
        }
    }
    for (index i = packs * width + thread_index(); i < elements; i += thread_count()) {
        const word magnitude = __float_as_uint(widen(x[i])) & 0x7FFFFFFF;
        largest = largest < magnitude ? magnitude : largest;
    }
    largest = block_largest(largest);
    if (threadIdx.x == 0) {
        ((word *)arguments.scratch)[blockIdx.x] = largest;
    }
}

// Writes the reciprocal of the scale (, the matrix as stored) (, the transposed matrix). One block
// for each tile of 64 rows and 64 columns.
// sizes: rows, columns, magnitudes in scratch memory, format, whether straight, whether transposed
KERNEL(quantise) {
    const int TILE = 64, WIDTH = 16 / sizeof(number);
    struct alignas(WIDTH) Codes {
        word words[WIDTH / 4];
    };
    struct alignas(16) Column16 {
        word words[4];
    };
    const number *__restrict__ x = read<number>(arguments, 0);
    const index rows = arguments.sizes[0], columns = arguments.sizes[1], format = arguments.sizes[3];
    unsigned char *straight = arguments.sizes[4] ? written<unsigned char>(arguments, 1) : 0;
    unsigned char *transposed = arguments.sizes[5] ? written<unsigned char>(arguments, arguments.sizes[4] ? 2 : 1) : 0;

    word largest = 0;
    for (index i = threadIdx.x; i < arguments.sizes[2]; i += blockDim.x) {
        const word part = ((const word *)arguments.scratch)[i];
        largest = largest < part ? part : largest;
    }
    largest = block_largest(largest);
    const int exponent_bits = (int)(largest >> 23);
    int exponent = fp8_format(format).largest_exponent - (exponent_bits - 127) - ((largest & 0x7FFFFF) > 0x600000);
    exponent = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
    exponent = largest == 0 || exponent_bits >= 255 ? 0 : exponent;
    const float scale = __uint_as_float((word)(exponent + 127) << 23);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        // Saturation would hide an infinity or NaN, so it turns the scale into NaN.
        *written<float>(arguments, 0) = __uint_as_float(exponent_bits >= 255 ? 0x7FC00000 : (word)(127 - exponent) << 23);
    }

    // Rows have 4 bytes of padding, so that threads reading down a column use different banks.
    __shared__ word tile[TILE][(TILE + 4) / 4];
    const index column_tiles = (columns + TILE - 1) / TILE;
    const index first_row = (index)blockIdx.x / column_tiles * TILE, first_column = (index)blockIdx.x % column_tiles * TILE;
    const bool is_packed = columns % WIDTH == 0 && (long_word)x % 16 == 0 && (long_word)straight % WIDTH == 0;
    for (int i = threadIdx.x; i < TILE * TILE / WIDTH; i += blockDim.x) {
        const int row = i / (TILE / WIDTH), column = i % (TILE / WIDTH) * WIDTH;
        const index at = (first_row + row) * columns + first_column + column;
        const bool is_row = first_row + row < rows;
        float given[WIDTH];
        if (is_packed && is_row && first_column + column < columns) {
            const Pack pack = *(const Pack *)(x + at);
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                given[k] = widen(pack.numbers[k]) * scale;
            }
        } else {
#pragma unroll
            for (int k = 0; k < WIDTH; k++) {
                given[k] = is_row && first_column + column + k < columns ? widen(x[at + k]) * scale : 0.0f;
            }
        }
        Codes codes;
#pragma unroll
        for (int k = 0; k < WIDTH; k += 4) {
            const word lower = nearest_codes(given[k], given[k + 1], format);
            codes.words[k / 4] = lower | nearest_codes(given[k + 2], given[k + 3], format) << 16;
            tile[row][(column + k) / 4] = codes.words[k / 4];
        }
        if (straight && is_row) {
            if (is_packed && first_column + column < columns) {
                *(Codes *)(straight + at) = codes;
            } else {
#pragma unroll
                for (int k = 0; k < WIDTH; k++) {
                    if (first_column + column + k < columns) {
                        straight[at + k] = (unsigned char)(codes.words[k / 4] >> k % 4 * 8);
                    }
                }
            }
        }
    }
    if (!transposed) {
        return;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE * TILE / 16; i += blockDim.x) {
        const int column = i / (TILE / 16), row = i % (TILE / 16) * 16;
        if (first_column + column >= columns) {
            continue;
        }
        Column16 codes16 = {{0, 0, 0, 0}};
#pragma unroll
        for (int k = 0; k < 16; k++) {
            codes16.words[k / 4] |= (tile[row + k][column / 4] >> column % 4 * 8 & 0xFF) << k % 4 * 8;
        }
        unsigned char *to = transposed + (first_column + column) * rows + first_row + row;
        if (rows % 16 == 0 && (long_word)transposed % 16 == 0 && first_row + row < rows) {
            *(Column16 *)to = codes16;
        } else {
#pragma unroll
            for (int k = 0; k < 16; k++) {
                if (first_row + row + k < rows) {
                    to[k] = (unsigned char)(codes16.words[k / 4] >> k % 4 * 8);
                }
            }
        }
    }
}

// Reads codes, scale; writes numbers in the run's precision. One block for each row.
// sizes: rows, columns, pitch of what is written, format
KERNEL(decode_fp8) {
    const unsigned char *codes = read<unsigned char>(arguments, 0);
    const float scale = *read<float>(arguments, 1);
    const index columns = arguments.sizes[1];
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
        number *to = written<number>(arguments, 0) + row * arguments.sizes[2];
        for (index i = threadIdx.x; i < columns; i += blockDim.x) {
            narrow(to[i], decode(codes[row * columns + i], arguments.sizes[3]) * scale);
        }
    }
}
