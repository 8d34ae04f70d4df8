"""Models to and from other formats and trainers: transformers, nanochat, DeepSeek-V4, Megatron-Core."""
