// Attention and its gradient on tensor cores, of sequences in a zigzag order.

TENSOR_KERNEL(attention_tensor_64_zigzag) { attend<64, true, true>(arguments); }
TENSOR_KERNEL(attention_tensor_128_zigzag) { attend<128, true, true>(arguments); }
TENSOR_KERNEL(attention_tensor_64_plain_zigzag) { attend<64, false, true>(arguments); }
TENSOR_KERNEL(attention_tensor_128_plain_zigzag) { attend<128, false, true>(arguments); }
TENSOR_KERNEL(attention_tensor_query_gradient_64_zigzag) { query_gradient<64, true, true>(arguments); }
TENSOR_KERNEL(attention_tensor_query_gradient_128_zigzag) { query_gradient<128, true, true>(arguments); }
TENSOR_KERNEL(attention_tensor_query_gradient_64_plain_zigzag) { query_gradient<64, false, true>(arguments); }
TENSOR_KERNEL(attention_tensor_query_gradient_128_plain_zigzag) { query_gradient<128, false, true>(arguments); }
TENSOR_KERNEL(attention_tensor_key_gradient_64_zigzag) { key_gradient<64, true, true>(arguments); }
TENSOR_KERNEL(attention_tensor_key_gradient_128_zigzag) { key_gradient<128, true, true>(arguments); }
TENSOR_KERNEL(attention_tensor_key_gradient_64_plain_zigzag) { key_gradient<64, false, true>(arguments); }
TENSOR_KERNEL(attention_tensor_key_gradient_128_plain_zigzag) { key_gradient<128, false, true>(arguments); }
