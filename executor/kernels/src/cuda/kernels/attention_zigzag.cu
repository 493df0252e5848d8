// Attention and its gradient on every device, of sequences in a zigzag order.

KERNEL(attention_64_zigzag) { attend<8, true>(arguments); }
KERNEL(attention_128_zigzag) { attend<16, true>(arguments); }
KERNEL(attention_256_zigzag) { attend<32, true>(arguments); }
KERNEL(attention_query_gradient_64_zigzag) { query_gradient<8, true>(arguments); }
KERNEL(attention_query_gradient_128_zigzag) { query_gradient<16, true>(arguments); }
KERNEL(attention_query_gradient_256_zigzag) { query_gradient<32, true>(arguments); }
KERNEL(attention_key_gradient_64_zigzag) { key_gradient<8, true>(arguments); }
KERNEL(attention_key_gradient_128_zigzag) { key_gradient<16, true>(arguments); }
KERNEL(attention_key_gradient_256_zigzag) { key_gradient<32, true>(arguments); }
