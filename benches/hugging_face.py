#!/usr/bin/env python3
"""Writes models/tests/hugging_face.json with Transformers: `config.json` files, and each model's number of parameters.

The sizes are ours, chosen small, or the public figures of a known model. Each configuration is there with all fields that its class
writes, and without those that have their default, as in published files. Parameters are counted on the `meta` device.

Usage: benches/hugging_face.py [--check]      (needs torch and transformers from PyPI; --check compares and writes nothing)
"""
import argparse
import json
import pathlib
import sys

import torch
import transformers

FILE = pathlib.Path(__file__).resolve().parent.parent / "models/tests/hugging_face.json"


def decoder(layers, hidden, heads, ffn, vocab, positions, **others):
    return dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, intermediate_size=ffn, vocab_size=vocab,
                max_position_embeddings=positions, **others)


def rope(theta, **others):
    return dict(rope_parameters=dict(rope_theta=theta, rope_type="default", **others))


SMALL = (3, 64, 4, 160, 500, 128)
LLAMA31 = dict(rope_parameters=dict(rope_theta=500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                    original_max_position_embeddings=8192))

LATENT = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=2,
              moe_intermediate_size=48)

DELTA = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=24)

# Nemotron 3 Nano's layers (its `hybrid_override_pattern`).
LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
NANO = [LETTERS[letter] for letter in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"]

LARGE_WHISPER = dict(encoder_layers=32, decoder_layers=32, d_model=1280, encoder_attention_heads=20, decoder_attention_heads=20,
                     encoder_ffn_dim=5120, decoder_ffn_dim=5120, vocab_size=51866, num_mel_bins=128)
SEES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
SO400M = dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16)

# By name: the class of the configuration, that of the model, and the sizes.
CASES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", dict(n_layer=3, n_embd=64, n_head=4, vocab_size=500, n_positions=128)),
    "gpt2-relu": ("GPT2Config", "GPT2LMHeadModel", dict(n_layer=2, n_embd=48, n_head=4, n_inner=100, vocab_size=300, n_positions=64,
                                                      activation_function="relu", tie_word_embeddings=False)),
    "llama": ("LlamaConfig", "LlamaForCausalLM", decoder(*SMALL, num_key_value_heads=2)),
    "llama-biased": ("LlamaConfig", "LlamaForCausalLM", decoder(*SMALL, attention_bias=True, mlp_bias=True, head_dim=32)),
    "llama2-70b": ("LlamaConfig", "LlamaForCausalLM", decoder(80, 8192, 64, 28672, 32000, 4096, num_key_value_heads=8, rms_norm_eps=1e-5)),
    "llama3.1-8b": ("LlamaConfig", "LlamaForCausalLM", decoder(32, 4096, 32, 14336, 128256, 131072, num_key_value_heads=8,
                                                               rms_norm_eps=1e-5, **LLAMA31)),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", decoder(4, 64, 4, 48, 500, 128, num_key_value_heads=2, head_dim=16, intermediate_size_mlp=160,
                                                              num_local_experts=4, interleave_moe_layer_step=2)),
    "llama4-scout": ("Llama4TextConfig", "Llama4ForCausalLM", dict()),
    "llama4-maverick": ("Llama4TextConfig", "Llama4ForCausalLM", dict(num_local_experts=128, interleave_moe_layer_step=2)),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", decoder(*SMALL, num_key_value_heads=2, pad_token_id=0)),
    "smollm3-3b": ("SmolLM3Config", "SmolLM3ForCausalLM", dict()),
    "granite": ("GraniteConfig", "GraniteForCausalLM", decoder(*SMALL, num_key_value_heads=2, attention_bias=True)),
    "glm": ("GlmConfig", "GlmForCausalLM", decoder(*SMALL, num_key_value_heads=2, head_dim=16, attention_bias=True, pad_token_id=0)),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", decoder(*SMALL, num_key_value_heads=2, head_dim=16, pad_token_id=0)),
    "glm4-moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", decoder(*SMALL, num_key_value_heads=2, n_routed_experts=8, num_experts_per_tok=2,
                                                                moe_intermediate_size=48, use_qk_norm=True, head_dim=16)),
    "glm-4.5-air": ("Glm4MoeConfig", "Glm4MoeForCausalLM", dict(head_dim=128, attention_bias=True, pad_token_id=151329)),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", decoder(4, 64, 4, 48, 500, 128, num_key_value_heads=2, head_dim=16, num_local_experts=8,
                                                            sliding_window=32)),
    "gpt-oss-120b": ("GptOssConfig", "GptOssForCausalLM", dict()),
    "gpt-oss-20b": ("GptOssConfig", "GptOssForCausalLM", dict(num_hidden_layers=24, num_local_experts=32)),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", decoder(*SMALL, num_key_value_heads=2)),
    "olmo2-7b": ("Olmo2Config", "Olmo2ForCausalLM", decoder(32, 4096, 32, 11008, 100352, 4096, rms_norm_eps=1e-6, **rope(5e5))),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", decoder(5, 64, 4, 160, 500, 128, num_key_value_heads=2, sliding_window=32)),
    "olmo3-32b": ("Olmo3Config", "Olmo3ForCausalLM", decoder(64, 5120, 40, 27648, 100278, 65536, num_key_value_heads=8, rms_norm_eps=1e-6)),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", decoder(*SMALL, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2)),
    "olmoe-7b": ("OlmoeConfig", "OlmoeForCausalLM", dict(intermediate_size=1024)),
    "minimax-m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", decoder(*SMALL, num_key_value_heads=2, head_dim=16, num_local_experts=8,
                                                                      num_experts_per_tok=2)),
    "minimax-m2-229b": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", dict()),
    "seed-oss": ("SeedOssConfig", "SeedOssForCausalLM", decoder(*SMALL, num_key_value_heads=2, head_dim=32)),
    "seed-oss-36b": ("SeedOssConfig", "SeedOssForCausalLM", decoder(64, 5120, 80, 27648, 155136, 524288, num_key_value_heads=8, **rope(1e7))),
    "ernie4.5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", decoder(*SMALL, num_key_value_heads=2, head_dim=16, use_bias=True)),
    "ernie4.5-0.3b": ("Ernie4_5Config", "Ernie4_5ForCausalLM", dict()),
    "ernie4.5-moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", decoder(4, 64, 4, 160, 500, 128, num_key_value_heads=2, moe_num_experts=8, moe_k=2,
                                                                             moe_intermediate_size=48, moe_layer_end_index=3)),
    "ernie4.5-21b": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", dict()),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", decoder(5, 64, 4, 160, 500, 128, num_key_value_heads=2, sliding_window=32)),
    "exaone4-32b": ("Exaone4Config", "Exaone4ForCausalLM", decoder(64, 5120, 40, 27392, 102400, 131072, num_key_value_heads=8, sliding_window_pattern=4,
                                                                   **rope(1e6))),
    "hunyuan": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", decoder(*SMALL, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)),
    "hunyuan-7b": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", decoder(32, 4096, 32, 14336, 128167, 32768, num_key_value_heads=8, head_dim=128,
                                                                              tie_word_embeddings=True)),
    "hunyuan-moe": ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", decoder(*SMALL, num_key_value_heads=2, head_dim=32, num_experts=8, moe_topk=2)),
    "hunyuan-a13b": ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", decoder(32, 4096, 32, 3072, 128167, 32768, num_key_value_heads=8, head_dim=128,
                                                                             num_experts=64, moe_topk=[8] * 32, tie_word_embeddings=True)),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", decoder(*SMALL, num_key_value_heads=2, head_dim=16)),
    "arcee-4.5b": ("ArceeConfig", "ArceeForCausalLM", decoder(36, 2560, 20, 18432, 128004, 65536, num_key_value_heads=4, head_dim=128)),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", decoder(*SMALL, num_key_value_heads=2)),
    "granite3-3b-a800m": ("GraniteMoeConfig", "GraniteMoeForCausalLM", decoder(32, 1536, 24, 512, 49155, 4096, num_key_value_heads=8, num_local_experts=40,
                                                                              num_experts_per_tok=8, tie_word_embeddings=True)),
    "qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", decoder(5, 64, 4, 160, 500, 128, num_key_value_heads=2, head_dim=16, **DELTA,
                                                                     num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
                                                                     shared_expert_intermediate_size=40, mlp_only_layers=[0])),
    "qwen3-next-80b-a3b": ("Qwen3NextConfig", "Qwen3NextForCausalLM", dict(max_position_embeddings=262144,
                                                                           **rope(1e7, partial_rotary_factor=0.25))),
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", decoder(5, 64, 4, 160, 500, 128, num_key_value_heads=2, head_dim=16, **DELTA)),
    "qwen3.5-9b": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", dict()),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", dict(num_hidden_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=500,
                                                                        num_key_value_heads=2, head_dim=16, **DELTA, num_experts=8,
                                                                        num_experts_per_tok=2, moe_intermediate_size=48,
                                                                        shared_expert_intermediate_size=40)),
    "qwen3.5-35b-a3b": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", dict()),
    "granite-hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", decoder(
        3, 64, 4, 48, 500, 128, num_key_value_heads=2, shared_intermediate_size=40, layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_n_heads=8, mamba_d_state=16, mamba_n_groups=2, position_embedding_type="rope")),
    "granite4-tiny": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", decoder(
        40, 1536, 12, 512, 100352, 131072, num_key_value_heads=4, num_local_experts=62, num_experts_per_tok=6, shared_intermediate_size=1024,
        mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, tie_word_embeddings=True,
        layer_types=["full_attention" if layer in (5, 15, 25, 35) else "linear_attention" for layer in range(40)])),
    "granite4-micro": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", decoder(
        40, 2048, 32, 8192, 100352, 131072, num_key_value_heads=8, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=8192,
        mamba_n_heads=64, mamba_d_head=64, mamba_d_state=128, tie_word_embeddings=True,
        layer_types=["full_attention" if layer in (10, 13, 17, 27) else "linear_attention" for layer in range(40)])),
    "bamba": ("BambaConfig", "BambaForCausalLM", decoder(*SMALL, num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_state=16,
                                                        mamba_proj_bias=True)),
    "bamba-9b": ("BambaConfig", "BambaForCausalLM", dict(attn_layer_indices=[9, 18, 27], mamba_d_state=128)),
    "falcon-h1": ("FalconH1Config", "FalconH1ForCausalLM", decoder(*SMALL, num_key_value_heads=2, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16,
                                                                  mamba_d_state=16, mamba_n_groups=2, mamba_rms_norm=True)),
    "falcon-h1-0.5b": ("FalconH1Config", "FalconH1ForCausalLM", decoder(36, 1024, 8, 2048, 32784, 16384, num_key_value_heads=2, head_dim=64, mamba_d_ssm=1536,
                                                                        mamba_n_heads=24, mamba_d_head=64, mamba_d_state=128)),
    "nemotron-h": ("NemotronHConfig", "NemotronHForCausalLM", dict(
        hidden_size=64, vocab_size=500, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=160, max_position_embeddings=128,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"], mamba_num_heads=8, mamba_head_dim=16,
        ssm_state_size=16, n_groups=2, moe_intermediate_size=48, moe_shared_expert_intermediate_size=40)),
    "nemotron3-nano-30b": ("NemotronHConfig", "NemotronHForCausalLM", dict(
        hidden_size=2688, num_attention_heads=32, num_key_value_heads=2, head_dim=128, intermediate_size=1856, max_position_embeddings=262144,
        layers_block_type=NANO, mamba_num_heads=64, mamba_head_dim=64, n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712)),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", dict(num_hidden_layers=3, hidden_size=64, vocab_size=500, num_heads=8, head_dim=16, state_size=16,
                                                        n_groups=2)),
    "mamba2-7b": ("Mamba2Config", "Mamba2ForCausalLM", dict()),
    "mistral": ("MistralConfig", "MistralForCausalLM", decoder(*SMALL, num_key_value_heads=2, sliding_window=32)),
    "mistral-7b": ("MistralConfig", "MistralForCausalLM", decoder(32, 4096, 32, 14336, 32000, 32768, rms_norm_eps=1e-5)),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", decoder(*SMALL, num_key_value_heads=2, num_local_experts=4)),
    "mixtral-8x7b": ("MixtralConfig", "MixtralForCausalLM", decoder(32, 4096, 32, 14336, 32000, 32768)),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", decoder(*SMALL, num_key_value_heads=2)),
    "qwen2.5-7b": ("Qwen2Config", "Qwen2ForCausalLM", decoder(28, 3584, 28, 18944, 152064, 32768, num_key_value_heads=4, **rope(1e6))),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", decoder(*SMALL, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)),
    "qwen3-8b": ("Qwen3Config", "Qwen3ForCausalLM", decoder(36, 4096, 32, 12288, 151936, 40960, num_key_value_heads=8, **rope(1e6))),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", decoder(*SMALL, num_key_value_heads=2, moe_intermediate_size=48,
                                                                   num_local_experts=8, num_experts_per_tok=2, norm_topk_prob=True)),
    "qwen3-moe-sparse": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", decoder(4, 64, 4, 160, 500, 128, num_key_value_heads=2, num_local_experts=8,
                                                                          decoder_sparse_step=2, head_dim=32)),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", decoder(48, 2048, 32, 6144, 151936, 40960, num_key_value_heads=4, head_dim=128,
                                                                       norm_topk_prob=True, **rope(1e6))),
    "qwen2-moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", decoder(4, 64, 4, 160, 500, 128, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
                                                                   moe_intermediate_size=48, shared_expert_intermediate_size=96,
                                                                   decoder_sparse_step=2)),
    "qwen1.5-moe-a2.7b": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", decoder(24, 2048, 16, 5632, 151936, 8192, num_key_value_heads=16, **rope(1e6))),
    "qwen2-57b-a14b": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", decoder(28, 3584, 28, 18944, 151936, 32768, num_key_value_heads=4, num_experts=64,
                                                                        num_experts_per_tok=8, moe_intermediate_size=2560,
                                                                        shared_expert_intermediate_size=20480, **rope(1e6))),
    "deepseek-v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", decoder(*SMALL, **LATENT, q_lora_rank=24, first_k_dense_replace=1,
                                                                         attention_bias=True, v_head_dim=12)),
    "deepseek-v2-lite": ("DeepseekV2Config", "DeepseekV2ForCausalLM", decoder(27, 2048, 16, 10944, 102400, 4096, q_lora_rank=None, num_experts_per_tok=6,
                                                                              n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1408,
                                                                              first_k_dense_replace=1)),
    "deepseek-v2-236b": ("DeepseekV2Config", "DeepseekV2ForCausalLM", decoder(60, 5120, 128, 12288, 102400, 4096, num_experts_per_tok=6,
                                                                              n_routed_experts=160, n_shared_experts=2, moe_intermediate_size=1536,
                                                                              first_k_dense_replace=1, n_group=8, topk_group=3,
                                                                              topk_method="group_limited_greedy", routed_scaling_factor=16.0)),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", decoder(*SMALL, **LATENT, q_lora_rank=24, v_head_dim=16, n_group=2, topk_group=1,
                                                                         num_nextn_predict_layers=0)),
    "deepseek-v3-671b": ("DeepseekV3Config", "DeepseekV3ForCausalLM", dict()),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", decoder(*SMALL, num_key_value_heads=1, head_dim=32)),
    "gemma-2b": ("GemmaConfig", "GemmaForCausalLM", decoder(18, 2048, 8, 16384, 256000, 8192, num_key_value_heads=1, head_dim=256)),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", decoder(*SMALL, num_key_value_heads=2, head_dim=32, sliding_window=32)),
    "gemma2-9b": ("Gemma2Config", "Gemma2ForCausalLM", decoder(42, 3584, 16, 14336, 256000, 8192, num_key_value_heads=8, head_dim=256)),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", decoder(7, 64, 4, 160, 500, 128, num_key_value_heads=2, head_dim=32, sliding_window=32)),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", decoder(
        8, 64, 4, 160, 500, 128, num_key_value_heads=2, head_dim=16, global_head_dim=32, sliding_window=32, vocab_size_per_layer_input=400,
        hidden_size_per_layer_input=24, num_kv_shared_layers=4, use_double_wide_mlp=True, final_logit_softcapping=30.0,
        layer_types=["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(8)])),
    "gemma4-plain": ("Gemma4TextConfig", "Gemma4ForCausalLM", decoder(
        6, 64, 4, 160, 500, 128, num_key_value_heads=2, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
        sliding_window=32, hidden_size_per_layer_input=0)),
    "gemma4-e2b": ("Gemma4TextConfig", "Gemma4ForCausalLM", decoder(
        35, 1536, 8, 6144, 262144, 131072, num_key_value_heads=1, head_dim=256, num_kv_shared_layers=20, use_double_wide_mlp=True,
        final_logit_softcapping=30.0, layer_types=["full_attention" if layer % 5 == 4 else "sliding_attention" for layer in range(35)])),
    "gemma4-31b": ("Gemma4TextConfig", "Gemma4ForCausalLM", decoder(
        60, 5376, 32, 21504, 262144, 262144, num_key_value_heads=16, head_dim=256, num_global_key_value_heads=4, attention_k_eq_v=True,
        sliding_window=1024, hidden_size_per_layer_input=0, final_logit_softcapping=30.0)),
    "phi": ("PhiConfig", "PhiForCausalLM", decoder(*SMALL)),
    "phi-2": ("PhiConfig", "PhiForCausalLM", decoder(32, 2560, 32, 10240, 51200, 2048, **rope(1e4, partial_rotary_factor=0.4))),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", decoder(*SMALL, pad_token_id=0)),
    "phi3-mini": ("Phi3Config", "Phi3ForCausalLM", decoder(32, 3072, 32, 8192, 32064, 4096)),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", decoder(*SMALL)),
    "gpt-neox-serial": ("GPTNeoXConfig", "GPTNeoXForCausalLM", decoder(*SMALL, use_parallel_residual=False, attention_bias=False)),
    "gpt-neox-20b": ("GPTNeoXConfig", "GPTNeoXForCausalLM", decoder(44, 6144, 64, 24576, 50432, 2048)),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", dict(n_layer=3, n_embd=64, n_head=4, rotary_dim=8, n_inner=160, vocab_size=500, n_positions=128)),
    "gpt-j-6b": ("GPTJConfig", "GPTJForCausalLM", dict()),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", decoder(*SMALL, num_key_value_heads=2, sliding_window=32)),
    "starcoder2-unbiased": ("Starcoder2Config", "Starcoder2ForCausalLM", decoder(*SMALL, num_key_value_heads=4, use_bias=False,
                                                                                 tie_word_embeddings=False)),
    "starcoder2-3b": ("Starcoder2Config", "Starcoder2ForCausalLM", decoder(30, 3072, 24, 12288, 49152, 16384, num_key_value_heads=2,
                                                                           sliding_window=4096, **rope(999999.4420358813))),
    "starcoder2-7b": ("Starcoder2Config", "Starcoder2ForCausalLM", decoder(32, 4608, 36, 18432, 49152, 16384, num_key_value_heads=4,
                                                                           sliding_window=4096, **rope(1e6))),
    "starcoder2-15b": ("Starcoder2Config", "Starcoder2ForCausalLM", decoder(40, 6144, 48, 24576, 49152, 16384, num_key_value_heads=4,
                                                                            sliding_window=4096, tie_word_embeddings=False, **rope(1e5))),
    "mpt": ("MptConfig", "MptForCausalLM", dict(n_layers=3, d_model=64, n_heads=4, vocab_size=500, max_seq_len=128)),
    "mpt-7b": ("MptConfig", "MptForCausalLM", dict(n_layers=32, d_model=4096, n_heads=32, vocab_size=50432)),
    "cohere": ("CohereConfig", "CohereForCausalLM", decoder(*SMALL, num_key_value_heads=2, attention_bias=True)),
    "cohere-normed": ("CohereConfig", "CohereForCausalLM", decoder(*SMALL, num_key_value_heads=2, use_qk_norm=True)),
    "command-r": ("CohereConfig", "CohereForCausalLM", decoder(40, 8192, 64, 22528, 256000, 131072, num_key_value_heads=64, **rope(8e6))),
    "command-r-plus": ("CohereConfig", "CohereForCausalLM", decoder(64, 12288, 96, 33792, 256000, 131072, num_key_value_heads=8, use_qk_norm=True,
                                                                    logit_scale=0.8333333333333334, **rope(75e6))),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", decoder(5, 64, 4, 160, 500, 128, num_key_value_heads=2, sliding_window=32)),
    "command-r7b": ("Cohere2Config", "Cohere2ForCausalLM", decoder(32, 4096, 32, 14336, 256000, 8192, num_key_value_heads=8, logit_scale=0.25,
                                                                   **rope(5e4))),
    "kimi-linear": ("KimiLinearConfig", "KimiLinearForCausalLM", decoder(
        6, 64, 4, 160, 500, 128, num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, num_local_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=48, linear_num_heads=2, linear_head_dim=24,
        mlp_layer_types=["dense", "dense", "sparse", "sparse", "sparse", "sparse"], pad_token_id=0)),
    "kimi-linear-48b": ("KimiLinearConfig", "KimiLinearForCausalLM", dict()),
    "minimax": ("MiniMaxConfig", "MiniMaxForCausalLM", decoder(3, 64, 4, 48, 500, 128, num_key_value_heads=2, head_dim=24, num_local_experts=4)),
    "minimax-01-456b": ("MiniMaxConfig", "MiniMaxForCausalLM", decoder(
        80, 6144, 64, 9216, 200064, 10240000, num_key_value_heads=8, head_dim=128, num_local_experts=32,
        layer_types=["full_attention" if layer % 8 == 7 else "linear_attention" for layer in range(80)],
        **rope(1e7, partial_rotary_factor=0.5))),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", dict(n_layers=3, dim=64, n_heads=4, hidden_dim=160, vocab_size=500,
                                                                    max_position_embeddings=128)),
    "distilbert-base": ("DistilBertConfig", "DistilBertForMaskedLM", dict()),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", decoder(5, 64, 4, 96, 500, 128, local_attention=32, norm_bias=True, attention_bias=True,
                                                                      mlp_bias=True, classifier_bias=True, decoder_bias=False, pad_token_id=0)),
    "modernbert-base": ("ModernBertConfig", "ModernBertForMaskedLM", dict()),
    "modernbert-large": ("ModernBertConfig", "ModernBertForMaskedLM", decoder(28, 1024, 16, 2624, 50368, 8192)),
    "opt": ("OPTConfig", "OPTForCausalLM", dict(num_hidden_layers=3, hidden_size=64, num_attention_heads=4, ffn_dim=160, vocab_size=500,
                                                max_position_embeddings=128, word_embed_proj_dim=64)),
    "opt-6.7b": ("OPTConfig", "OPTForCausalLM", dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, ffn_dim=16384,
                                                     word_embed_proj_dim=4096)),
    "bloom": ("BloomConfig", "BloomForCausalLM", dict(n_layer=3, hidden_size=64, n_head=4, vocab_size=500)),
    "bloom-176b": ("BloomConfig", "BloomForCausalLM", dict(n_layer=70, hidden_size=14336, n_head=112)),
    "falcon": ("FalconConfig", "FalconForCausalLM", dict(num_hidden_layers=3, hidden_size=64, num_attention_heads=4, vocab_size=500)),
    "falcon-alibi": ("FalconConfig", "FalconForCausalLM", dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=500,
                                                              alibi=True, bias=True, multi_query=False, parallel_attn=False)),
    "falcon-7b": ("FalconConfig", "FalconForCausalLM", dict()),
    "falcon-40b": ("FalconConfig", "FalconForCausalLM", dict(num_hidden_layers=60, hidden_size=8192, num_attention_heads=128, num_kv_heads=8,
                                                             new_decoder_architecture=True)),
    "bert": ("BertConfig", "BertForMaskedLM", decoder(*SMALL)),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", decoder(2, 64, 4, 160, 500, 130, type_vocab_size=1)),
    "roberta-base": ("RobertaConfig", "RobertaForMaskedLM", decoder(12, 768, 12, 3072, 50265, 514, type_vocab_size=1, layer_norm_eps=1e-5)),
    "t5": ("T5Config", "T5ForConditionalGeneration", dict(num_layers=2, d_model=64, num_heads=4, d_kv=16, d_ff=160, vocab_size=500)),
    "t5-v1.1": ("T5Config", "T5ForConditionalGeneration", dict(num_layers=2, d_model=64, num_heads=3, d_kv=16, d_ff=160, vocab_size=500,
                                                              feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", dict(
        encoder_layers=2, decoder_layers=3, d_model=64, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=160,
        decoder_ffn_dim=160, vocab_size=500, num_mel_bins=16, max_source_positions=40, max_target_positions=24, pad_token_id=0)),
    "whisper-tiny": ("WhisperConfig", "WhisperForConditionalGeneration", dict()),
    "whisper-large-v3": ("WhisperConfig", "WhisperForConditionalGeneration", LARGE_WHISPER),
    "whisper-large-v3-turbo": ("WhisperConfig", "WhisperForConditionalGeneration", dict(LARGE_WHISPER, decoder_layers=4)),
    "clip": ("CLIPConfig", "CLIPModel", dict(
        text_config=dict(SEES, vocab_size=500, max_position_embeddings=24, hidden_size=48), vision_config=dict(SEES, image_size=30, patch_size=8),
        projection_dim=40)),
    "clip-vit-base-patch32": ("CLIPConfig", "CLIPModel", dict()),
    "clip-vit-large-patch14": ("CLIPConfig", "CLIPModel", dict(
        text_config=dict(hidden_size=768, intermediate_size=3072, num_attention_heads=12),
        vision_config=dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, patch_size=14),
        projection_dim=768)),
    "siglip": ("SiglipConfig", "SiglipModel", dict(
        text_config=dict(SEES, vocab_size=500, max_position_embeddings=24), vision_config=dict(SEES, image_size=30, patch_size=8))),
    "siglip-base": ("SiglipConfig", "SiglipModel", dict()),
    "siglip-so400m-patch14-384": ("SiglipConfig", "SiglipModel", dict(
        text_config=dict(SO400M), vision_config=dict(SO400M, image_size=384, patch_size=14))),
    "gemma3n": ("Gemma3nTextConfig", "Gemma3nForCausalLM", decoder(
        10, 64, 4, 160, 500, 128, num_key_value_heads=2, head_dim=16, sliding_window=32, vocab_size_per_layer_input=400,
        hidden_size_per_layer_input=24, num_kv_shared_layers=5, laurel_rank=8, altup_num_inputs=3, activation_sparsity_pattern=[0.95] * 4 + [0.0] * 6)),
    "gemma3n-e2b": ("Gemma3nTextConfig", "Gemma3nForCausalLM", dict(num_hidden_layers=30, intermediate_size=8192, num_kv_shared_layers=10)),
    "gemma3n-e4b": ("Gemma3nTextConfig", "Gemma3nForCausalLM", dict()),
    "vit": ("ViTConfig", "ViTForImageClassification", dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=160,
                                                           image_size=32, patch_size=8)),
    "vit-base": ("ViTConfig", "ViTForImageClassification", dict(num_labels=10)),
    "resnet": ("ResNetConfig", "ResNetForImageClassification", dict(depths=[2, 2, 2, 2], layer_type="basic", hidden_sizes=[64, 128, 256, 512])),
    "resnet-50": ("ResNetConfig", "ResNetForImageClassification", dict(num_labels=10)),
}

# Models of images and text: the text model's sizes, and those of the part that sees.
SEES_SIGLIP = dict(SEES, model_type="siglip_vision_model", image_size=896, patch_size=14, vision_use_head=False)
SEES_CLIP = dict(SEES, model_type="clip_vision_model", image_size=32, patch_size=8)
SIGLIP_SO400M = dict(model_type="siglip_vision_model", hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16,
                     image_size=896, patch_size=14, vision_use_head=False)
SEES_QWEN = dict(depth=1, hidden_size=32, num_heads=2, out_hidden_size=64)
WITH_IMAGES = {
    "llama4-images": ("Llama4Config", "Llama4ForConditionalGeneration", decoder(
        *SMALL, num_key_value_heads=2, head_dim=16, intermediate_size_mlp=100, num_local_experts=2), SEES),
    "llama4-images-tied": ("Llama4Config", "Llama4ForConditionalGeneration", decoder(
        *SMALL, num_key_value_heads=2, head_dim=16, num_local_experts=2, tie_word_embeddings=True), SEES),
    "gemma3-images": ("Gemma3Config", "Gemma3ForConditionalGeneration", decoder(*SMALL[:5], 512, num_key_value_heads=2, head_dim=32), SEES_SIGLIP),
    "gemma3-4b": ("Gemma3Config", "Gemma3ForConditionalGeneration", dict(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024,
        rope_scaling=dict(factor=8.0, rope_type="linear")), SIGLIP_SO400M),
    "gemma3-12b": ("Gemma3Config", "Gemma3ForConditionalGeneration", dict(
        hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8, sliding_window=1024), SIGLIP_SO400M),
    "qwen2-vl": ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration", decoder(*SMALL, num_key_value_heads=2, tie_word_embeddings=False),
                 dict(depth=1, embed_dim=32, num_heads=2, hidden_size=64)),
    "qwen2.5-vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", decoder(*SMALL, num_key_value_heads=2, tie_word_embeddings=True), SEES_QWEN),
    "qwen3-vl-moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", decoder(
        *SMALL, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
                     dict(SEES_QWEN, deepstack_visual_indexes=[0])),
    "qwen3-vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", decoder(*SMALL, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False),
                 dict(SEES_QWEN, deepstack_visual_indexes=[0])),
    "qwen2.5-vl-7b": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", decoder(
        28, 3584, 28, 18944, 152064, 128000, num_key_value_heads=4, tie_word_embeddings=False), dict(hidden_size=1280, out_hidden_size=3584)),
    "qwen3-vl-8b": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", decoder(
        36, 4096, 32, 12288, 151936, 262144, num_key_value_heads=8, tie_word_embeddings=False), dict(out_hidden_size=4096)),
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration", dict(model_type="llama", **decoder(*SMALL, num_key_value_heads=2)), SEES_CLIP),
    "llava-1.5-7b": ("LlavaConfig", "LlavaForConditionalGeneration", dict(model_type="llama", vocab_size=32064, max_position_embeddings=4096, rms_norm_eps=1e-5),
                     dict(model_type="clip_vision_model", hidden_size=1024, image_size=336, intermediate_size=4096, num_attention_heads=16,
                          num_hidden_layers=24, patch_size=14, projection_dim=768, vocab_size=32000)),
    "paligemma": ("PaliGemmaConfig", "PaliGemmaForConditionalGeneration", dict(model_type="gemma", **decoder(
        *SMALL, num_key_value_heads=1, head_dim=32)), dict(SEES_SIGLIP, image_size=32, patch_size=8)),
    "mistral3": ("Mistral3Config", "Mistral3ForConditionalGeneration", dict(model_type="mistral", **decoder(*SMALL, num_key_value_heads=2, sliding_window=None)),
                 dict(SEES, model_type="pixtral", head_dim=16)),
    "mistral-small-3.1-24b": ("Mistral3Config", "Mistral3ForConditionalGeneration", dict(model_type="mistral", **decoder(
        40, 5120, 32, 32768, 131072, 131072, num_key_value_heads=8, head_dim=128, sliding_window=None, rms_norm_eps=1e-5)), dict(model_type="pixtral")),
}

# Of Llama 4 the text model alone is planned.
TEXT_ALONE = ("llama4",)


# Fields that every published file has.
ALWAYS = ["model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]


def parameters(config, model):
    with torch.device("meta"):
        built = getattr(transformers, model)(config)
    built.tie_weights()
    return sum(one.numel() for one in {id(one): one for one in built.parameters()}.values())


def text_parameters(config, model):
    with torch.device("meta"):
        built = getattr(transformers, model)(config)
    built.tie_weights()
    text = getattr(built, "language_model", None) or built.model.language_model
    all_of_text = [*text.parameters(), *(built.lm_head.parameters() if hasattr(built, "lm_head") else [])]
    return sum(one.numel() for one in {id(one): one for one in all_of_text}.values())


def finite(value):
    """The same without infinite numbers, which JSON has not."""
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return None if value == float("inf") else value


def differing(whole, defaults, always):
    return {field: value for field, value in whole.items() if field in always or defaults.get(field, ...) != value}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    lines = []
    for name, (config_class, model, sizes) in CASES.items():
        config = getattr(transformers, config_class)(**sizes)
        whole, defaults = config.to_dict(), getattr(transformers, config_class)().to_dict()
        sparse = differing(whole, defaults, ALWAYS)
        case = {"name": name, "parameters": parameters(config, model), "whole": whole, "sparse": sparse}
        print(f"{name:20} {case['parameters']:>16,}")
        lines.append(json.dumps(finite(case), default=str))
    for name, (config_class, model, sizes, sees) in WITH_IMAGES.items():
        config = getattr(transformers, config_class)(text_config=sizes, vision_config=sees)
        whole, defaults = config.to_dict(), getattr(transformers, config_class)().to_dict()
        sparse = differing(whole, defaults, ["model_type"])
        sparse["text_config"] = differing(whole["text_config"], defaults["text_config"], ["model_type"])
        count = text_parameters if name.startswith(TEXT_ALONE) else parameters
        case = {"name": name, "parameters": count(config, model), "whole": whole, "sparse": sparse}
        print(f"{name:20} {case['parameters']:>16,}")
        lines.append(json.dumps(finite(case), default=str))
    cases = ",\n".join(lines)
    text = f'{{"transformers": "{transformers.__version__}", "cases": [\n{cases}\n]}}\n'
    if arguments.check:
        sys.exit(None if FILE.read_text() == text else f"{FILE} differs")
    FILE.write_text(text)


if __name__ == "__main__":
    main()
