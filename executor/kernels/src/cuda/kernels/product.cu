// The fallback for matrix products that cuBLASLt does not take, or without cuBLASLt: tiles of 16 by
// 16 in shared memory, sums in single precision. D[rows, columns] = A · B, where A and B may be
// transposed. The grid's third dimension is a batch.

// Applies an epilogue to a sum: the bias (third read), then an activation: none (0), ReLU (1), GELU
// (2), GELU with its argument as the second write (3), or a product with GELU's derivative at the
// fourth read (4). Operands beside D are dense.
__device__ __forceinline__ float with_epilogue(const Arguments &arguments, float sum, bool has_bias, index activation, index row,
                                               index column, index columns) {
    if (has_bias) {
        sum += widen(read<number>(arguments, 2)[column]);
    }
    if (activation == 1) {
        return sum > 0.0f ? sum : 0.0f;
    }
    if (activation == 3) {
        narrow(written<number>(arguments, 1)[row * columns + column], sum);
    }
    if (activation == 2 || activation == 3) {
        return tanh_gelu(sum);
    }
    if (activation == 4) {
        return sum * tanh_gelu_derivative(widen(read<number>(arguments, 3)[row * columns + column]));
    }
    return sum;
}

// Applies an epilogue to a product D of the library, in place.
// sizes: rows, columns, whether there is a bias, activation, pitch of D
KERNEL(product_epilogue) {
    const index columns = arguments.sizes[1], all = arguments.sizes[0] * columns, pitch = arguments.sizes[4];
    number *d = written<number>(arguments, 0);
    for (index i = thread_index(); i < all; i += thread_count()) {
        const index row = i / columns, column = i % columns, at = row * pitch + column;
        narrow(d[at], with_epilogue(arguments, widen(d[at]), arguments.sizes[2] != 0, arguments.sizes[3], row, column, columns));
    }
}

// Reads A, B (, bias) (, GELU's argument); writes D (, GELU's argument). sizes: rows, columns,
// contracted, whether A is transposed, whether B is, whether there is a bias, activation, whether D
// is in single precision, pitches of A, B and D
KERNEL(product) {
    __shared__ float a_tile[16][17], b_tile[16][17];
    const index rows = arguments.sizes[0], columns = arguments.sizes[1], contracted = arguments.sizes[2];
    const bool a_transposed = arguments.sizes[3] != 0, b_transposed = arguments.sizes[4] != 0;
    const number *a = read<number>(arguments, 0) + (index)blockIdx.z * rows * contracted;
    const number *b = read<number>(arguments, 1) + (index)blockIdx.z * contracted * columns;
    const index a_pitch = arguments.sizes[8], b_pitch = arguments.sizes[9];
    const int tile_row = threadIdx.x / 16, tile_column = threadIdx.x % 16;
    const index column_tiles = (columns + 15) / 16;
    const index row = blockIdx.x / column_tiles * 16 + tile_row, column = blockIdx.x % column_tiles * 16 + tile_column;
    float sum = 0.0f;
    for (index start = 0; start < contracted; start += 16) {
        const index a_k = start + tile_column, b_k = start + tile_row;
        a_tile[tile_row][tile_column] =
            row < rows && a_k < contracted ? widen(a[a_transposed ? a_k * a_pitch + row : row * a_pitch + a_k]) : 0.0f;
        b_tile[tile_row][tile_column] =
            column < columns && b_k < contracted ? widen(b[b_transposed ? column * b_pitch + b_k : b_k * b_pitch + column]) : 0.0f;
        __syncthreads();
        for (int k = 0; k < 16; k++) {
            sum += a_tile[tile_row][k] * b_tile[k][tile_column];
        }
        __syncthreads();
    }
    if (row < rows && column < columns) {
        sum = with_epilogue(arguments, sum, arguments.sizes[5] != 0, arguments.sizes[6], row, column, columns);
        const index at = ((index)blockIdx.z * rows + row) * arguments.sizes[10] + column;
        if (arguments.sizes[7] != 0) {
            store(arguments, written<float>(arguments, 0) + at, sum);
        } else {
            narrow(written<number>(arguments, 0)[at], sum);
        }
    }
}
