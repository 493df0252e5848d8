// A warp's products on tensor cores, and copies to shared memory that nobody waits for at once: thin names for instructions of sm_80 and
// later. foretell's emulator has each of them for the processor, a warp's fragments laid out as NVIDIA's PTX ISA has them (9.7.14, mma.m16n8k16,
// ldmatrix; 9.7.9, cp.async). Sixteen-bit precisions alone.
//
// A fragment of 16 rows by 16 columns is four words of each thread, two numbers a word: of thread `lane`, rows lane / 4 and eight further,
// columns lane % 4 * 2 and eight further. Sums of 16 rows by 8 columns are four floats: two columns of the one row, two of the other.

#ifndef FORETELL_EMULATED

// sum += left (16 x 16) times right (16 x 8).
__device__ __forceinline__ void multiply_add(float (&sum)[4], const word (&left)[4], word right, word right_after) {
#if PRECISION == 1
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right), "r"(right_after));
}

__device__ __forceinline__ word shared_address(const void *pointer) {
    long_word address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
    return (word)address;
}

// Four matrices of 8 rows by 16 bytes: lanes 0 to 7 say where the rows of the first are, lanes 8 to 15 those of the second, and so on.
__device__ __forceinline__ void load_matrices(word (&to)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// The same, each transposed.
__device__ __forceinline__ void load_transposed(word (&to)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Sixteen bytes to shared memory, or zeros where there are none; there once the thread has waited.
__device__ __forceinline__ void copy_later(void *to, const void *from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ word pack(float low, float high) {
    word packed;
#if PRECISION == 1
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

// 2^x to about two units in the last place; of minus infinity, zero.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif

// A tile of numbers in shared memory. Rows are 16 bytes apart beyond their length, so that eight of them lie in different banks.
template <int FEATURES> struct Tile {
    static const int WIDE = FEATURES + 8;

    // Sets off the copies of a tile of `ROWS` rows; zeros from `count` on, and beyond `features`, which eight divides.
    template <int ROWS, int THREADS>
    static __device__ __forceinline__ void fetch(number *tile, const number *from, index stride, int count, int features) {
        const int packs = FEATURES / 8;
#pragma unroll
        for (int i = threadIdx.x; i < ROWS * packs; i += THREADS) {
            const int row = i / packs, feature = i % packs * 8;
            const bool is_there = row < count && feature < features;
            copy_later(tile + row * WIDE + feature, is_there ? from + row * stride + feature : from, is_there);
        }
    }

    // sums[m][n] += 16 rows of left, from m * 16 on, times 8 rows of right, from n * 8 on: over all features.
    template <int TILES, int COLUMNS>
    static __device__ __forceinline__ void multiply_rows(float (&sums)[TILES][COLUMNS / 8][4], const number *left, const number *right) {
        const int lane = threadIdx.x % 32;
        const number *of_left = left + lane % 16 * WIDE + lane / 16 * 8;
        const number *of_right = right + (lane % 8 + lane / 16 * 8) * WIDE + lane / 8 % 2 * 8;
#pragma unroll
        for (int k = 0; k < FEATURES; k += 16) {
            word a[TILES][4], b[4];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                load_matrices(a[m], of_left + m * 16 * WIDE + k);
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; n++) {
                load_matrices(b, of_right + n * 16 * WIDE + k);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_add(sums[m][2 * n], a[m], b[0], b[1]);
                    multiply_add(sums[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // sums[m][f] += weights, 16 rows by COLUMNS as a product left them, rounded, times the rows of right: 8 features of them from f * 8 on.
    template <int TILES, int COLUMNS>
    static __device__ __forceinline__ void multiply_weights(float (&sums)[TILES][FEATURES / 8][4],
                                                            const float (&weights)[TILES][COLUMNS / 8][4], const number *right) {
        const int lane = threadIdx.x % 32;
        const number *of_right = right + lane % 16 * WIDE + lane / 16 * 8;
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++) {
            word a[TILES][4], b[4];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float(&w)[4] = weights[m][2 * k + half];
                    a[m][2 * half] = pack(w[0], w[1]);
                    a[m][2 * half + 1] = pack(w[2], w[3]);
                }
            }
#pragma unroll
            for (int f = 0; f < FEATURES / 16; f++) {
                load_transposed(b, of_right + k * 16 * WIDE + f * 16);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_add(sums[m][2 * f], a[m], b[0], b[1]);
                    multiply_add(sums[m][2 * f + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
};

// Sums over the four threads that have a row of a fragment.
__device__ __forceinline__ float four_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}
__device__ __forceinline__ float four_largest(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

// Zeros.
template <int TILES, int COLUMNS> __device__ __forceinline__ void clear(float (&sums)[TILES][COLUMNS][4]) {
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            sums[m][n][0] = sums[m][n][1] = sums[m][n][2] = sums[m][n][3] = 0.0f;
        }
    }
}
