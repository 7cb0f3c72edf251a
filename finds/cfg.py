"""Writes a config with tiles: python finds/cfg.py OUT [json of overrides by dotted key]"""
import json, sys
c = {
 "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
 "zero_optimization": {"stage": 0}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
 "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
 "dsx": {"model": {"config": {"model_type": "llama", "vocab_size": 89, "hidden_size": 32, "intermediate_size": 48,
   "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}},
  "parallel": {"tensor": 1, "pipeline": 1, "chunks": "auto"}, "schedule": {"name": "auto"},
  "data": {"source": "synthetic", "sequence_length": 23}, "train": {"steps": 4, "output": "/tmp/eyes_tiles_out"},
  "mlp_tiles": 5}}
for k, v in json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}").items():
    at = c
    *path, last = k.split(".")
    for p in path: at = at.setdefault(p, {})
    at[last] = v
json.dump(c, open(sys.argv[1], "w"), indent=1)
