// A warp's products on tensor cores, and asynchronous copies to shared memory: wrappers of sm_80
// instructions, for 16-bit precisions only. Foretell's emulator implements each for the CPU.
//
// Fragments are laid out as in NVIDIA's PTX ISA (9.7.14, mma.m16n8k16 and ldmatrix; 9.7.9,
// cp.async). A fragment of 16 rows by 16 columns is four words of each thread, two numbers a word:
// thread `lane` has rows lane / 4 and lane / 4 + 8, and columns lane % 4 * 2 and lane % 4 * 2 + 8,
// each with the next. Sums of 16 rows by 8 columns are four floats: two columns of either row.

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

// Loads four matrices of 8 rows by 16 bytes. Lanes 0 to 7 pass the addresses of the first matrix's
// rows, lanes 8 to 15 those of the second, and so on.
__device__ __forceinline__ void load_matrices(word (&to)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// Loads the same four matrices, each transposed.
__device__ __forceinline__ void load_transposed(word (&to)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts a copy of 16 bytes to shared memory, or of zeros if `has_data` is false. It is complete
// once the thread has called wait_for_copies.
__device__ __forceinline__ void copy_async(void *to, const void *from, bool has_data) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(has_data ? 16 : 0) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Two floats rounded to 16 bits, `low` in the lower half.
__device__ __forceinline__ word pack(float low, float high) {
    word packed;
#if PRECISION == 1
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

// 2^x, to about two units in the last place; zero for minus infinity.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif

// A tile of rows in shared memory. Rows have 16 bytes of padding, so that eight of them are in
// different banks.
template <int FEATURES> struct Tile {
    // Elements from one row to the next.
    static const int PITCH = FEATURES + 8;

    // Starts the copies of a tile of `ROWS` rows. Rows from `count` on, and features from
    // `features` on (a multiple of 8), are zeros.
    template <int ROWS, int THREADS>
    static __device__ __forceinline__ void fetch(number *tile, const number *from, index stride, int count, int features) {
        const int packs = FEATURES / 8;
#pragma unroll
        for (int i = threadIdx.x; i < ROWS * packs; i += THREADS) {
            const int row = i / packs, feature = i % packs * 8;
            const bool has_data = row < count && feature < features;
            copy_async(tile + row * PITCH + feature, has_data ? from + row * stride + feature : from, has_data);
        }
    }

    // sums[m][n] += left[m * 16 .. + 16] · right[n * 8 .. + 8]ᵀ, over all features.
    template <int TILES, int COLUMNS>
    static __device__ __forceinline__ void multiply_rows(float (&sums)[TILES][COLUMNS / 8][4], const number *left, const number *right) {
        const int lane = threadIdx.x % 32;
        const number *left_row = left + lane % 16 * PITCH + lane / 16 * 8;
        const number *right_row = right + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 8;
#pragma unroll
        for (int k = 0; k < FEATURES; k += 16) {
            word a[TILES][4], b[4];
#pragma unroll
            for (int m = 0; m < TILES; m++) {
                load_matrices(a[m], left_row + m * 16 * PITCH + k);
            }
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; n++) {
                load_matrices(b, right_row + n * 16 * PITCH + k);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_add(sums[m][2 * n], a[m], b[0], b[1]);
                    multiply_add(sums[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    // sums[m][f] += weights[m] · right[.., f * 8 .. + 8]. The weights are the sums of a product, 16
    // rows by COLUMNS, and are rounded to 16 bits.
    template <int TILES, int COLUMNS>
    static __device__ __forceinline__ void multiply_weights(float (&sums)[TILES][FEATURES / 8][4],
                                                            const float (&weights)[TILES][COLUMNS / 8][4], const number *right) {
        const int lane = threadIdx.x % 32;
        const number *right_row = right + lane % 16 * PITCH + lane / 16 * 8;
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
                load_transposed(b, right_row + k * 16 * PITCH + f * 16);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_add(sums[m][2 * f], a[m], b[0], b[1]);
                    multiply_add(sums[m][2 * f + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
};

// Sum and maximum over the four threads that share a row of a fragment.
__device__ __forceinline__ float four_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}
__device__ __forceinline__ float four_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

template <int TILES, int COLUMNS> __device__ __forceinline__ void clear(float (&sums)[TILES][COLUMNS][4]) {
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            sums[m][n][0] = sums[m][n][1] = sums[m][n][2] = sums[m][n][3] = 0.0f;
        }
    }
}
