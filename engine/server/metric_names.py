"""Names of metrics, all behind `mambalign:`, and how they stand to those that dashboards for vLLM ask for.

A dashboard works after its prefix `vllm:` is replaced: the names in use today are the same (`DASHBOARD_NAMES`), the
older ones are served as well (`OLD_NAMES`), and what has no meaning here is named with the reason (`WITHOUT_MEANING`).
"""

PREFIX = "mambalign:"

DASHBOARD_NAMES = frozenset(
    (
        "e2e_request_latency_seconds",
        "generation_tokens_total",
        "inter_token_latency_seconds",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "prompt_tokens_total",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_inference_time_seconds",
        "request_max_num_generation_tokens",
        "request_params_max_tokens",
        "request_params_n",
        "request_prefill_time_seconds",
        "request_prompt_tokens",
        "request_queue_time_seconds",
        "request_success_total",
        "request_time_per_output_token_seconds",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_drafts_total",
        "time_to_first_token_seconds",
    )
)
OLD_NAMES = {  # old -> the one that has the same values
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_hits_total": "prefix_cache_hits_total",
    "gpu_prefix_cache_queries_total": "prefix_cache_queries_total",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}
WITHOUT_MEANING = {
    "cpu_cache_usage_perc": "caches lie on one device",
    "iteration_tokens_total": "see prompt_tokens_total and generation_tokens_total",
    "lora_requests_info": "no adapters are served",
    "num_requests_swapped": "a preempted request starts over from the cache; see num_preemptions_total",
}
# Fields of EngineStats whose metric is called otherwise.
STATS_NAMES = {
    "kv_cache_usage": "kv_cache_usage_perc",
    "mamba_cache_usage": "mamba_cache_usage_perc",
    "spec_decode_accepted_per_position": "spec_decode_num_accepted_tokens_per_pos_total",
    "fused_copy_checks": "fused_copy_checks_total",
    "fused_copy_copies": "fused_copy_copies_total",
    "prefix_cache_misses": "prefix_cache_misses_total",
}
# Fields of EngineStats that are dicts: the label that their keys have.
STATS_LABELS = {
    "fused_copy_checks": "bias",
    "fused_copy_copies": "bias",
    "kv_cache_blocks": "state",
    "mamba_cache_blocks": "state",
    "prefix_cache_misses": "cause",
}
STATS_HELP = {
    "num_requests_running": "Requests in the running batch",
    "num_requests_waiting": "Requests that wait for room",
    "kv_cache_usage": "Share of KV blocks that requests hold, 0 to 1",
    "mamba_cache_usage": "Share of recurrent-state blocks that requests hold, 0 to 1",
    "kv_cache_blocks": "KV blocks: held by requests, cached and held by none, free",
    "mamba_cache_blocks": "Recurrent-state blocks: held by requests, cached and held by none, free",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits_total": "Prompt tokens found in the prefix cache",
    "prefix_cache_misses": "Requests that found nothing in the prefix cache, by the reason",
    "num_preemptions_total": "Requests preempted",
    "prompt_tokens_total": "Prompt tokens taken in",
    "generation_tokens_total": "Tokens generated",
    "spec_decode_num_drafts_total": "Steps of a request that verified drafts",
    "spec_decode_num_draft_tokens_total": "Draft tokens verified",
    "spec_decode_num_accepted_tokens_total": "Draft tokens kept",
    "spec_decode_accepted_per_position": "Draft tokens kept, by position in the draft",
    "precopies_total": "Rows whose state crossed a block boundary before a forward pass",
    "precopies_biased_total": "Of those, with a token bias above 0",
    "postcopies_total": "Boundary states copied after sampling",
    "fused_copy_checks": "Rows and steps compared with the scalar copy path",
    "fused_copy_copies": "Of those, rows whose state moved",
    "fused_copy_mismatches_total": "Of those, rows that differed",
}
