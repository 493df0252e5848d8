// A matrix product for what cuBLASLt does not take (or where it is not there): tiles of 16 by 16 in shared memory, sums in single
// precision. D[rows, columns] = A · B, each of A and B as it is or transposed in memory; the grid's third dimension is a batch.

// A sum with what is done to it in the same pass: a bias (the third read), and by `last` nothing (0), ReLU (1), GELU (2), GELU with what it is
// applied to as the second write (3), or times a GELU's slope at the fourth read (4). What lies beside D is dense.
__device__ __forceinline__ float with_epilogue(const Arguments &arguments, float sum, bool has_bias, index last, index row, index column,
                                          index columns) {
    if (has_bias) {
        sum += widen(read<number>(arguments, 2)[column]);
    }
    if (last == 1) {
        return sum > 0.0f ? sum : 0.0f;
    }
    if (last == 3) {
        narrow(written<number>(arguments, 1)[row * columns + column], sum);
    }
    if (last == 2 || last == 3) {
        return gelu_of(sum);
    }
    if (last == 4) {
        return sum * gelu_slope(widen(read<number>(arguments, 3)[row * columns + column]));
    }
    return sum;
}

// What `finished` says, in place on a D that a library made. sizes: rows, columns, whether there is a bias, what is done last, elements from a row
// of D to the next
KERNEL(product_epilogue) {
    const index columns = arguments.sizes[1], all = arguments.sizes[0] * columns, pitch = arguments.sizes[4];
    number *d = written<number>(arguments, 0);
    for (index i = this_thread(); i < all; i += all_threads()) {
        const index row = i / columns, column = i % columns, at = row * pitch + column;
        narrow(d[at], with_epilogue(arguments, widen(d[at]), arguments.sizes[2] != 0, arguments.sizes[3], row, column, columns));
    }
}

// Reads A, B (, bias, what a GELU was applied to); writes D (, what one is applied to). sizes: rows, columns, contracted, whether A is transposed,
// whether B is, whether there is a bias, what is done last, whether D is in single precision, elements from a row in memory to the next of A, of B
// and of D
KERNEL(product) {
    __shared__ float a_tile[16][17], b_tile[16][17];
    const index rows = arguments.sizes[0], columns = arguments.sizes[1], contracted = arguments.sizes[2];
    const bool a_transposed = arguments.sizes[3] != 0, b_transposed = arguments.sizes[4] != 0;
    const number *a = read<number>(arguments, 0) + (index)blockIdx.z * rows * contracted;
    const number *b = read<number>(arguments, 1) + (index)blockIdx.z * contracted * columns;
    const index a_pitch = arguments.sizes[8], b_pitch = arguments.sizes[9];
    const int down = threadIdx.x / 16, along = threadIdx.x % 16;
    const index column_tiles = (columns + 15) / 16;
    const index row = blockIdx.x / column_tiles * 16 + down, column = blockIdx.x % column_tiles * 16 + along;
    float sum = 0.0f;
    for (index start = 0; start < contracted; start += 16) {
        const index a_k = start + along, b_k = start + down;
        a_tile[down][along] =
            row < rows && a_k < contracted ? widen(a[a_transposed ? a_k * a_pitch + row : row * a_pitch + a_k]) : 0.0f;
        b_tile[down][along] =
            column < columns && b_k < contracted ? widen(b[b_transposed ? column * b_pitch + b_k : b_k * b_pitch + column]) : 0.0f;
        __syncthreads();
        for (int k = 0; k < 16; k++) {
            sum += a_tile[down][k] * b_tile[k][along];
        }
        __syncthreads();
    }
    if (row < rows && column < columns) {
        sum = with_epilogue(arguments, sum, arguments.sizes[5] != 0, arguments.sizes[6], row, column, columns);
        const index at = ((index)blockIdx.z * rows + row) * arguments.sizes[10] + column;
        if (arguments.sizes[7] != 0) {
            put(arguments, written<float>(arguments, 0) + at, sum);
        } else {
            narrow(written<number>(arguments, 0)[at], sum);
        }
    }
}
