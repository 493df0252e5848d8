//! Files and commands of every framework, in the shape of published ones.

/// Arguments of Megatron-LM in the shape of a published script.
pub(super) const MEGATRON: &str = r#"#!/bin/bash
GPUS_PER_NODE=8
TP=${TP:-2}
MODEL="--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048"
MOE_ARGS=(
    --num-experts 8  # a comment
    --moe-router-topk 2
    --moe-layer-freq '([1]*12)'
)
TRAIN_ARGS=(--micro-batch-size 1 --global-batch-size $((GPUS_PER_NODE * 4)) --bf16)
torchrun --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py $MODEL "${MOE_ARGS[@]}" ${TRAIN_ARGS[@]} \
    --max-position-embeddings 2048 --vocab-size 32000 --swiglu --normalization RMSNorm --position-embedding-type rope \
    --disable-bias-linear --untie-embeddings-and-output-weights --tensor-model-parallel-size $TP \
    --expert-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --save $CHECKPOINTS "$@" 2>&1 | tee log
"#;

pub(super) const TORCHTITAN: &str = r#"
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
[activation_checkpoint]
mode = "selective"
[optimizer]
name = "AdamW"
"#;

pub(super) const DEEPSPEED: &str = r#"{
  "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "offload_optimizer": {"device": "none"}},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}}
}"#;

pub(super) const TRAINER: &str = r#"{
  "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": true, "optim": "adamw_torch",
  "gradient_checkpointing": true, "fsdp": "full_shard auto_wrap", "weight_decay": 0.1, "deepspeed": null
}"#;

pub(super) const ACCELERATE: &str = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  \
                          fsdp_sharding_strategy: FULL_SHARD\n  fsdp_offload_params: false\n";

pub(super) const ACCELERATE_ZERO: &str = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n\
                               deepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: none\n  gradient_accumulation_steps: 4\n";

pub(super) const TORCHTUNE: &str = "model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, v_proj], \
                         apply_lora_to_mlp: true, lora_rank: 8, lora_alpha: 16}\ntokenizer: {max_seq_len: 2048}\nbatch_size: 2\n\
                         optimizer: {_component_: torch.optim.AdamW, lr: 3e-4}\nloss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}\n\
                         gradient_accumulation_steps: 8\nenable_activation_checkpointing: false\ndtype: bf16\n";

pub(super) const AXOLOTL: &str = "base_model: org/7b\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nadapter: qlora\nlora_r: 32\nlora_target_linear: true\n\
                       optimizer: adamw_torch_fused\nbf16: true\ngradient_checkpointing: true\nsequence_len: 4096\n";

pub(super) const LLAMA_FACTORY: &str = "model_name_or_path: org/7b\nstage: sft\nfinetuning_type: lora\nlora_rank: 8\nlora_target: all\ncutoff_len: 2048\n\
                             per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nbf16: true\n";

pub(super) const SWIFT: &str = "NPROC_PER_NODE=8 swift sft --model org/7b --train_type lora --lora_rank 8 --torch_dtype bfloat16 --dataset d \\\n  \
                     --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_length 2048 --deepspeed zero2\n";

pub(super) const OPEN_RLHF: &str = "deepspeed --module openrlhf.cli.train_sft --pretrain org/7b --dataset d --max_len 2048 --micro_train_batch_size 2 \\\n  \
                         --train_batch_size 128 --zero_stage 2 --bf16 --flash_attn --gradient_checkpointing\n";

pub(super) const MEGATRON_SWIFT: &str = "NPROC_PER_NODE=8 megatron sft --model org/moe --tensor_model_parallel_size 2 --expert_model_parallel_size 4 \\\n  \
                              --micro_batch_size 1 --global_batch_size 32 --sequence_parallel true --recompute_granularity full --recompute_method uniform \\\n  \
                              --max_length 8192\n";

pub(super) const INTERN_VL: &str = "torchrun --nproc_per_node 8 internvl_chat_finetune.py --model_name_or_path org/m --force_image_size 448 --freeze_llm False \\\n  \
                         --freeze_backbone True --per_device_train_batch_size 4 --bf16 True --max_seq_length 4096 --output_dir o\n";
