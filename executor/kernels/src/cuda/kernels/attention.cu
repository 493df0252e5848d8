// Attention and its gradient on every device, of sequences in the order of their positions.

KERNEL(attention_64) { attend<8, false>(arguments); }
KERNEL(attention_128) { attend<16, false>(arguments); }
KERNEL(attention_256) { attend<32, false>(arguments); }
KERNEL(attention_query_gradient_64) { query_gradient<8, false>(arguments); }
KERNEL(attention_query_gradient_128) { query_gradient<16, false>(arguments); }
KERNEL(attention_query_gradient_256) { query_gradient<32, false>(arguments); }
KERNEL(attention_key_gradient_64) { key_gradient<8, false>(arguments); }
KERNEL(attention_key_gradient_128) { key_gradient<16, false>(arguments); }
KERNEL(attention_key_gradient_256) { key_gradient<32, false>(arguments); }

// The dot product of out and dout: one warp for each query and head.
KERNEL(attention_dots) {
    const Sizes sizes = sizes_of<false>(arguments);
    const index heads = sizes.key_heads * sizes.group, rows = sizes.batch * sizes.queries * heads;
    for (index row = thread_index() / 32; row < rows; row += thread_count() / 32) {
        float sum = 0.0f;
        for (index f = threadIdx.x % 32; f < sizes.features; f += 32) {
            const index at = row * sizes.features + f;
            sum += widen(read<number>(arguments, 0)[at]) * widen(read<number>(arguments, 4)[at]);
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) {
            const index head = row % heads, query = row / heads % sizes.queries, image = row / heads / sizes.queries;
            ((float *)arguments.scratch)[(image * heads + head) * sizes.queries + query] = sum;
        }
    }
}

// The bias table's gradient, from the partial gradients of all tiles of queries. Writes dtable, or
// adds to it. sizes: parts, elements of the table; scratch: the partial gradients
KERNEL(attention_table_gradient) {
    const float *parts = (const float *)arguments.scratch;
    for (index i = thread_index(); i < arguments.sizes[1]; i += thread_count()) {
        double sum = 0.0;
        for (index part = 0; part < arguments.sizes[0]; part++) {
            sum += parts[part * arguments.sizes[1] + i];
        }
        store(arguments, written<float>(arguments, 0) + i, (float)sum);
    }
}
