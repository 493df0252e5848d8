"""A vision-language model (LLaVA): CLIP at 336 pixels and a Llama of 22 layers, in bf16."""

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration


def setup():
    eyes = CLIPVisionConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=336,
                            patch_size=14, projection_dim=768)
    text = LlamaConfig(vocab_size=32064, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                       num_key_value_heads=4, use_cache=False)
    m = LlavaForConditionalGeneration(LlavaConfig(vision_config=eyes, text_config=text, image_token_index=32000))
    m = m.to("cuda", torch.bfloat16)
    return m, torch.optim.AdamW(m.parameters(), lr=1e-4)


def step(m, o, batch=2, sequence=1024):
    x = torch.randint(0, 32000, (batch, sequence), device="cuda")
    p = torch.randn(batch, 3, 336, 336, device="cuda", dtype=torch.bfloat16)
    loss = m(input_ids=x, pixel_values=p, labels=x).loss
    loss.backward()
    o.step()
    o.zero_grad()
