"""`model_index.json` of the published repositories, and the fields that their configuration files have.

A configuration function takes what the installed library writes for a tiny component and returns the published
fields, with the tiny sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Config = dict[str, Any]

EULER = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
CLIP_TOKENIZER = ["transformers", "CLIPTokenizer"]
T5_TOKENIZER = ["transformers", "T5TokenizerFast"]

INDEXES: dict[str, Config] = {
    "sd3": {  # stabilityai/stable-diffusion-3.5-medium
        "_class_name": "StableDiffusion3Pipeline",
        "_diffusers_version": "0.31.0.dev0",
        "scheduler": EULER,
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_3": ["transformers", "T5EncoderModel"],
        "tokenizer": CLIP_TOKENIZER,
        "tokenizer_2": CLIP_TOKENIZER,
        "tokenizer_3": T5_TOKENIZER,
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    },
    "flux": {  # black-forest-labs/FLUX.1-dev
        "_class_name": "FluxPipeline",
        "_diffusers_version": "0.30.0.dev0",
        "scheduler": EULER,
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer": CLIP_TOKENIZER,
        "tokenizer_2": T5_TOKENIZER,
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    },
    "qwen_image": {  # Qwen/Qwen-Image
        "_class_name": "QwenImagePipeline",
        "_diffusers_version": "0.34.0.dev0",
        "scheduler": EULER,
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    },
    "wan": {  # Wan-AI/Wan2.1-T2V-1.3B-Diffusers
        "_class_name": "WanPipeline",
        "_diffusers_version": "0.33.0.dev0",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": T5_TOKENIZER,
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    },
    "hunyuan_video": {  # hunyuanvideo-community/HunyuanVideo
        "_class_name": "HunyuanVideoPipeline",
        "_diffusers_version": "0.32.0.dev0",
        "scheduler": EULER,
        "text_encoder": ["transformers", "LlamaModel"],
        "text_encoder_2": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "LlamaTokenizerFast"],
        "tokenizer_2": CLIP_TOKENIZER,
        "transformer": ["diffusers", "HunyuanVideoTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLHunyuanVideo"],
    },
}


def _diffusers(version: str, fields: str, written: Config, **changes: Any) -> Config:
    kept = {name: written[name] for name in ("_class_name", *fields.split()) if name in written}
    return kept | {"_diffusers_version": version} | changes


def _clip(written: Config) -> Config:
    """The ids of special tokens are those of an old default, as in the repositories; pooling copes with them."""
    fields = """architectures attention_dropout hidden_act hidden_size initializer_factor initializer_range
        intermediate_size layer_norm_eps max_position_embeddings model_type num_attention_heads num_hidden_layers
        projection_dim vocab_size"""
    legacy = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "dropout": 0.0}
    return _transformers("4.43.3", "bfloat16", fields, written) | legacy


def _t5(written: Config, version: str, dtype: str, **more: Any) -> Config:
    fields = """architectures classifier_dropout d_ff d_kv d_model dense_act_fn dropout_rate eos_token_id
        feed_forward_proj initializer_factor is_gated_act layer_norm_epsilon model_type num_decoder_layers
        num_heads num_layers pad_token_id relative_attention_max_distance relative_attention_num_buckets
        vocab_size"""
    legacy = {"decoder_start_token_id": 0, "is_encoder_decoder": True, "output_past": True, "use_cache": True}
    return _transformers(version, dtype, fields, written) | legacy | {"tie_word_embeddings": False} | more


def _llama(written: Config) -> Config:
    fields = """architectures attention_bias attention_dropout bos_token_id eos_token_id head_dim hidden_act
        hidden_size initializer_range intermediate_size max_position_embeddings mlp_bias model_type
        num_attention_heads num_hidden_layers num_key_value_heads pad_token_id pretraining_tp rms_norm_eps
        tie_word_embeddings use_cache vocab_size"""
    rope = {"rope_scaling": None, "rope_theta": written["rope_parameters"]["rope_theta"]}
    return _transformers("4.46.3", "float16", fields, written) | rope


def _qwen(written: Config) -> Config:
    """The fields of the text model, in the outer configuration and again in `text_config`."""
    inner, vision = written["text_config"], written["vision_config"]
    rope = inner["rope_parameters"]
    fields = """attention_dropout bos_token_id eos_token_id hidden_act hidden_size initializer_range
        intermediate_size max_position_embeddings max_window_layers num_attention_heads num_hidden_layers
        num_key_value_heads rms_norm_eps sliding_window use_cache use_sliding_window vocab_size"""
    text = {name: inner[name] for name in fields.split()} | {
        "rope_scaling": {"mrope_section": rope["mrope_section"], "rope_type": "default", "type": "default"},
        "rope_theta": rope["rope_theta"],
    }
    outer = """architectures image_token_id model_type tie_word_embeddings video_token_id vision_end_token_id
        vision_start_token_id"""
    vision_fields = """depth fullatt_block_indexes hidden_act hidden_size in_channels initializer_range
        intermediate_size num_heads out_hidden_size patch_size spatial_merge_size temporal_patch_size
        tokens_per_second window_size"""
    return {
        **_transformers("4.53.1", "bfloat16", outer, written),
        **text,
        "text_config": {**text, "layer_types": inner["layer_types"], "model_type": "qwen2_5_vl_text"},
        "vision_config": {name: vision[name] for name in vision_fields.split()} | {"model_type": "qwen2_5_vl"},
    }


def _transformers(version: str, dtype: str, fields: str, written: Mapping[str, Any]) -> Config:
    kept = {name: written[name] for name in fields.split()}
    return kept | {"torch_dtype": dtype, "transformers_version": version}


IMAGE_VAE = """act_fn block_out_channels down_block_types in_channels latent_channels latents_mean latents_std
    layers_per_block mid_block_add_attention norm_num_groups out_channels sample_size scaling_factor shift_factor
    up_block_types use_post_quant_conv use_quant_conv"""
VIDEO_VAE = """attn_scales base_dim dim_mult dropout latents_mean latents_std num_res_blocks temperal_downsample
    z_dim"""
HUNYUAN_VAE = """act_fn block_out_channels down_block_types in_channels latent_channels layers_per_block
    mid_block_add_attention norm_num_groups out_channels scaling_factor spatial_compression_ratio
    temporal_compression_ratio up_block_types"""
EULER_FIELDS = """base_image_seq_len base_shift max_image_seq_len max_shift num_train_timesteps shift
    shift_terminal use_dynamic_shifting"""
UNIPC_FIELDS = """beta_end beta_schedule beta_start disable_corrector dynamic_thresholding_ratio final_sigmas_type
    flow_shift lower_order_final num_train_timesteps predict_x0 prediction_type rescale_betas_zero_snr
    sample_max_value solver_order solver_p solver_type steps_offset thresholding timestep_spacing trained_betas
    use_beta_sigmas use_exponential_sigmas use_flow_sigmas use_karras_sigmas"""
SD3_FIELDS = """attention_head_dim caption_projection_dim dual_attention_layers in_channels joint_attention_dim
    num_attention_heads num_layers out_channels patch_size pooled_projection_dim pos_embed_max_size qk_norm
    sample_size"""
FLUX_FIELDS = """attention_head_dim axes_dims_rope guidance_embeds in_channels joint_attention_dim
    num_attention_heads num_layers num_single_layers patch_size pooled_projection_dim"""
QWEN_FIELDS = """attention_head_dim axes_dims_rope guidance_embeds in_channels joint_attention_dim
    num_attention_heads num_layers out_channels patch_size"""
WAN_FIELDS = """added_kv_proj_dim attention_head_dim cross_attn_norm eps ffn_dim freq_dim image_dim in_channels
    num_attention_heads num_layers out_channels patch_size qk_norm rope_max_seq_len text_dim"""
HUNYUAN_FIELDS = """attention_head_dim guidance_embeds in_channels mlp_ratio num_attention_heads num_layers
    num_refiner_layers num_single_layers out_channels patch_size patch_size_t pooled_projection_dim qk_norm
    rope_axes_dim rope_theta text_embed_dim"""

CONFIGS: dict[str, Callable[[Config], Config]] = {
    "FlowMatchEulerDiscreteScheduler": partial(_diffusers, "0.30.0.dev0", EULER_FIELDS),
    "UniPCMultistepScheduler": partial(_diffusers, "0.33.0.dev0", UNIPC_FIELDS),
    "SD3Transformer2DModel": partial(_diffusers, "0.31.0.dev0", SD3_FIELDS),
    "FluxTransformer2DModel": partial(_diffusers, "0.30.0.dev0", FLUX_FIELDS),
    # A field that the class has dropped.
    "QwenImageTransformer2DModel": partial(_diffusers, "0.34.0.dev0", QWEN_FIELDS, pooled_projection_dim=768),
    "WanTransformer3DModel": partial(_diffusers, "0.33.0.dev0", WAN_FIELDS),
    "HunyuanVideoTransformer3DModel": partial(_diffusers, "0.32.0.dev0", HUNYUAN_FIELDS),
    "AutoencoderKL": partial(_diffusers, "0.30.0.dev0", IMAGE_VAE, force_upcast=True),
    "AutoencoderKLQwenImage": partial(_diffusers, "0.34.0.dev0", VIDEO_VAE),
    "AutoencoderKLWan": partial(_diffusers, "0.33.0.dev0", VIDEO_VAE),
    "AutoencoderKLHunyuanVideo": partial(_diffusers, "0.32.0.dev0", HUNYUAN_VAE),
    "CLIPTextModel": _clip,
    "CLIPTextModelWithProjection": _clip,
    "T5EncoderModel": partial(_t5, version="4.43.3", dtype="bfloat16"),
    "UMT5EncoderModel": partial(
        _t5, version="4.48.0.dev0", dtype="float32", scalable_attention=True, tokenizer_class="T5Tokenizer"
    ),
    "LlamaModel": _llama,
    "Qwen2_5_VLForConditionalGeneration": _qwen,
}
