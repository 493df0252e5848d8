// Attention and its gradient on tensor cores, of sequences in the order of their positions.

TENSOR_KERNEL(attention_tensor_64) { attend<64, true, false>(arguments); }
TENSOR_KERNEL(attention_tensor_128) { attend<128, true, false>(arguments); }
TENSOR_KERNEL(attention_tensor_64_plain) { attend<64, false, false>(arguments); }
TENSOR_KERNEL(attention_tensor_128_plain) { attend<128, false, false>(arguments); }
TENSOR_KERNEL(attention_tensor_query_gradient_64) { query_gradient<64, true, false>(arguments); }
TENSOR_KERNEL(attention_tensor_query_gradient_128) { query_gradient<128, true, false>(arguments); }
TENSOR_KERNEL(attention_tensor_query_gradient_64_plain) { query_gradient<64, false, false>(arguments); }
TENSOR_KERNEL(attention_tensor_query_gradient_128_plain) { query_gradient<128, false, false>(arguments); }
TENSOR_KERNEL(attention_tensor_key_gradient_64) { key_gradient<64, true, false>(arguments); }
TENSOR_KERNEL(attention_tensor_key_gradient_128) { key_gradient<128, true, false>(arguments); }
TENSOR_KERNEL(attention_tensor_key_gradient_64_plain) { key_gradient<64, false, false>(arguments); }
TENSOR_KERNEL(attention_tensor_key_gradient_128_plain) { key_gradient<128, false, false>(arguments); }
