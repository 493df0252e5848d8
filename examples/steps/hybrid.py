"""A hybrid of Mamba 2 and attention (Bamba), every layer checkpointed, in bf16."""

import torch
from transformers import BambaConfig, BambaForCausalLM


def setup():
    config = BambaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=8, attn_layer_indices=[9, 18], mamba_n_heads=64, mamba_d_head=64, mamba_d_state=128, use_cache=False)
    m = BambaForCausalLM(config).to("cuda", torch.bfloat16)
    m.gradient_checkpointing_enable()
    return m, torch.optim.AdamW(m.parameters(), lr=1e-4)


def step(m, o, batch=2, sequence=2048):
    x = torch.randint(0, 32000, (batch, sequence), device="cuda")
    loss = m(input_ids=x, labels=x).loss
    loss.backward()
    o.step()
    o.zero_grad()
