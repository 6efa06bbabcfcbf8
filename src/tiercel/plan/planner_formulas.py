"""The planner's formulas, one cell each, with unit and assumption: the only place where they stand.

The command line, the JSON and the served page evaluate them in Python; the page that works without a server
gets the same cells printed as JavaScript. Nothing here has a value: inputs come from `planner_inputs`.
"""

from __future__ import annotations

from tiercel.plan import breakeven
from tiercel.plan.planner_sheet import Cell, Sheet

# What a rank holds (fullest rank), beside the sequence totals of the break-even sheet.
MODEL_INPUTS = (
    "weight_bytes",
    "active_weight_bytes",
    "rank_token_bytes",
    "rank_window_token_bytes",
    "rank_fixed_bytes",
)
HARDWARE_INPUTS = (
    "gpus",
    "pp",
    "hbm_bytes",
    "hbm_use",
    "hbm_reserve_bytes",
    "hbm_bytes_per_s",
    "hbm_efficiency",
    "ram_bytes_per_s",
    "ram_latency_s",
    "disk_bytes_per_s",
    "disk_latency_s",
    "ram_limit_bytes",
    "disk_limit_bytes",
)
TRAFFIC_INPUTS = (
    "sessions",
    "context_tokens",
    "new_tokens",
    "output_tokens",
    "turns",
    "idle_s",
    "shared_tokens",
)
PRICE_INPUTS = ("gpu_hour_price", "ram_gb_month_price", "disk_gb_month_price")
INPUTS = breakeven.INPUTS + MODEL_INPUTS + HARDWARE_INPUTS + TRAFFIC_INPUTS + PRICE_INPUTS

_SIZES = (
    Cell("bytes_per_token", "kv_token_bytes", "bytes", "what every further token adds; from the geometry"),
    Cell("window_bytes_per_token", "kv_window_token_bytes", "bytes", "per token inside the window"),
    Cell("window_tokens", "kv_window_tokens", "tokens", "the widest window of the layers that stop growing"),
    Cell("fixed_state_bytes", "kv_fixed_bytes", "bytes", "per session whatever its length"),
)

_FITS = (
    Cell("gpus_per_replica", "tp * pp", "GPUs", "one copy of the model"),
    Cell("replicas", "floor(gpus / gpus_per_replica)", "replicas", "GPUs left over are idle"),
    Cell(
        "sessions_per_replica",
        "sessions / replicas",
        "sessions",
        "the router keeps a session on its replica",
    ),
    Cell(
        "rank_kv_bytes",
        "rank_token_bytes * n + rank_window_token_bytes * min(n, kv_window_tokens) + rank_fixed_bytes",
        "bytes",
        "one sequence on the fullest rank: MLA and surplus KV heads are copies",
        ("n",),
    ),
    Cell("session_tokens", "context_tokens + output_tokens", "tokens", "at the end of a turn"),
    Cell("session_kv_bytes", "kv_bytes(session_tokens)", "bytes", "distinct bytes of one whole session"),
    Cell(
        "shared_kv_bytes",
        "kv_token_bytes * shared_tokens + kv_window_token_bytes * min(shared_tokens, kv_window_tokens)",
        "bytes",
        "the prefix that all sessions share, stored once",
    ),
    Cell(
        "private_kv_bytes",
        "max(session_kv_bytes - shared_kv_bytes, 0)",
        "bytes",
        "what a session adds to the shared prefix; recurrent state once per session",
    ),
    Cell(
        "rank_shared_bytes",
        "rank_token_bytes * shared_tokens + rank_window_token_bytes * min(shared_tokens, kv_window_tokens)",
        "bytes",
        "the shared prefix on one rank",
    ),
    Cell(
        "rank_private_bytes",
        "max(rank_kv_bytes(session_tokens) - rank_shared_bytes, 1)",
        "bytes",
        "a session's own part on one rank",
    ),
    Cell(
        "rank_weight_bytes",
        "weight_bytes / gpus_per_replica",
        "bytes",
        "weights divide evenly over tp and pp",
    ),
    Cell(
        "hbm_kv_bytes",
        "hbm_bytes * hbm_use - rank_weight_bytes - hbm_reserve_bytes",
        "bytes",
        "per GPU, after weights, activations and CUDA graphs; negative: the weights do not fit",
    ),
    Cell(
        "hbm_sessions",
        "max(floor((hbm_kv_bytes - rank_shared_bytes) / rank_private_bytes), 0)",
        "sessions",
        "per replica, whole sessions; allocator padding left out",
    ),
    Cell("hbm_sessions_per_gpu", "hbm_sessions / gpus_per_replica", "sessions", "memory alone"),
    Cell(
        "hbm_tokens",
        "max(floor((hbm_kv_bytes - rank_fixed_bytes - rank_window_token_bytes * kv_window_tokens)"
        " / rank_token_bytes), 0)",
        "tokens",
        "one sequence with all the KV memory of a replica",
    ),
    Cell(
        "overtake_tokens",
        "rank_weight_bytes / rank_token_bytes",
        "tokens",
        "so many cached tokens weigh as much as the weights",
    ),
)

_TIERS = (
    Cell(
        "working_set_bytes",
        "sessions * private_kv_bytes + shared_kv_bytes",
        "bytes",
        "every live session once, whatever the number of replicas; the shared prefix once",
    ),
    Cell(
        "ram_bytes",
        "min(working_set_bytes, ram_limit_bytes)",
        "bytes",
        "recommended for all hosts together: the working set, up to what the hosts have",
    ),
    Cell("reused_tokens", "max(context_tokens - new_tokens, shared_tokens)", "tokens", "on a later turn"),
    Cell(
        "ram_load_s",
        "load_s(rank_kv_bytes(n), ram_bytes_per_s, ram_latency_s)",
        "s",
        "every GPU loads its own part over its own PCIe link; loading is not overlapped with compute",
        ("n",),
    ),
    Cell(
        "disk_load_s",
        "load_s(kv_bytes(n), disk_bytes_per_s, disk_latency_s)",
        "s",
        "the replica's host reads every distinct byte once; not overlapped with compute",
        ("n",),
    ),
    Cell(
        "ram_needed_bytes_per_s",
        "rank_kv_bytes(p) / (compression * compute_s(p, 0))",
        "bytes/s",
        "break-even per GPU link",
        ("p",),
    ),
    Cell(
        "ram_least_prefix",
        f"least(lambda p: compute_s(p, 0) - ram_load_s(p), {breakeven.PREFIX_LIMIT_TOKENS})",
        "tokens",
        "shortest prefix worth loading from RAM",
    ),
    Cell(
        "disk_least_prefix",
        f"least(lambda p: compute_s(p, 0) - disk_load_s(p), {breakeven.PREFIX_LIMIT_TOKENS})",
        "tokens",
        "shortest prefix worth loading from disk",
    ),
    Cell(
        "disk_gain_s",
        "compute_s(reused_tokens, 0) - disk_load_s(reused_tokens)",
        "s",
        "what loading the reused prefix from disk saves over computing it; negative: not worth it",
    ),
    Cell(
        "disk_bytes",
        "min(working_set_bytes, disk_limit_bytes) if disk_gain_s > 0 else 0",
        "bytes",
        "recommended: the working set again (RAM's blocks are written through), where loading wins",
    ),
    Cell("hbm_share", "min(hbm_sessions / sessions_per_replica, 1)", "share", "all sessions equally likely"),
    Cell(
        "ram_share",
        "max(min(ram_bytes / working_set_bytes, 1) - hbm_share, 0)",
        "share",
        "RAM also holds what HBM holds; all sessions equally likely to return",
    ),
    Cell(
        "disk_share",
        "max(min(disk_bytes / working_set_bytes, 1) - hbm_share - ram_share, 0)",
        "share",
        "what is in no faster tier",
    ),
)

_TTFT = (
    Cell(
        "pass_s",
        "max(compute_s(x, p), weight_bytes / (tp * hbm_bytes_per_s * hbm_efficiency))",
        "s",
        "roofline: FLOPs, or reading the weights once; pipeline stages work one after another; no queue",
        ("x", "p"),
    ),
    Cell("ttft_recompute_s", "pass_s(context_tokens, 0)", "s", "nothing cached"),
    Cell(
        "ttft_hbm_s",
        "pass_s(context_tokens - reused_tokens, reused_tokens)",
        "s",
        "the reused prefix is still in GPU memory",
    ),
    Cell(
        "ttft_ram_s",
        "min(ttft_recompute_s, ram_load_s(reused_tokens) + ttft_hbm_s)",
        "s",
        "load, then compute the rest; never more than recomputing, which is what is done instead",
    ),
    Cell("ttft_disk_s", "min(ttft_recompute_s, disk_load_s(reused_tokens) + ttft_hbm_s)", "s", "as from RAM"),
    Cell(
        "ttft_first_s",
        "pass_s(context_tokens - shared_tokens, shared_tokens)",
        "s",
        "first turn: only the shared prefix is cached, in HBM",
    ),
    Cell("first_share", "1 / turns", "share", "every session starts once"),
    Cell(
        "ttft_without_s",
        "first_share * ttft_first_s"
        " + (1 - first_share) * (hbm_share * ttft_hbm_s + (1 - hbm_share) * ttft_first_s)",
        "s",
        "mean with the engine's own prefix cache in HBM only",
    ),
    Cell(
        "ttft_with_s",
        "first_share * ttft_first_s + (1 - first_share) * (hbm_share * ttft_hbm_s"
        " + ram_share * min(ttft_ram_s, ttft_first_s) + disk_share * min(ttft_disk_s, ttft_first_s)"
        " + (1 - hbm_share - ram_share - disk_share) * ttft_first_s)",
        "s",
        "mean with the tiers below HBM; no queueing",
    ),
    Cell("ttft_gain", "ttft_without_s / ttft_with_s", "times", "mean without over mean with"),
    Cell("ttft_hit_gain", "ttft_recompute_s / ttft_ram_s", "times", "one returning request, RAM hit"),
)

_LOAD = (
    Cell("turns_per_s", "sessions / idle_s", "1/s", "idle time is from the start of a turn to the next"),
    Cell(
        "busy_s",
        "prefill_flops(x, p) / (gpu_flops * mfu)",
        "GPU s",
        "GPU time of a prefill, however many GPUs share it",
        ("x", "p"),
    ),
    Cell(
        "decode_batch",
        "max(min(min(hbm_sessions, sessions_per_replica), 256), 1)",
        "sequences",
        "as many as fit, at most 256 (vLLM's usual limit)",
    ),
    Cell(
        "decode_step_s",
        "(min(weight_bytes, active_weight_bytes * decode_batch) / gpus_per_replica"
        " + decode_batch * rank_kv_bytes(context_tokens)) / (hbm_bytes_per_s * hbm_efficiency)",
        "s",
        "one decode step is bound by memory: weights (at most all experts) and the batch's KV, per GPU",
    ),
    Cell(
        "decode_busy_s",
        "output_tokens * decode_step_s * gpus_per_replica / decode_batch",
        "GPU s",
        "GPU time of one turn's answer at the full batch; pipeline stages kept full",
    ),
    Cell("first_busy_s", "busy_s(context_tokens - shared_tokens, shared_tokens)", "GPU s", "a first turn"),
    Cell("hit_busy_s", "busy_s(context_tokens - reused_tokens, reused_tokens)", "GPU s", "a returning turn"),
    Cell(
        "hit_share_with",
        "(1 - first_share) * (hbm_share + (ram_share if ttft_ram_s < ttft_first_s else 0)"
        " + (disk_share if ttft_disk_s < ttft_first_s else 0))",
        "share",
        "turns that find their prefix and gain by loading it",
    ),
    Cell("hit_share_without", "(1 - first_share) * hbm_share", "share", "turns that find it in HBM"),
    Cell(
        "turn_busy_without_s",
        "hit_share_without * hit_busy_s + (1 - hit_share_without) * first_busy_s + decode_busy_s",
        "GPU s",
        "prefill and decode of one turn, HBM prefix cache only",
    ),
    Cell(
        "turn_busy_with_s",
        "hit_share_with * hit_busy_s + (1 - hit_share_with) * first_busy_s + decode_busy_s",
        "GPU s",
        "prefill and decode of one turn, with tiers; copies take no compute",
    ),
    Cell("load_without", "turns_per_s * turn_busy_without_s / gpus", "share", "above 1: too few GPUs"),
    Cell("load_with", "turns_per_s * turn_busy_with_s / gpus", "share", "above 1: too few GPUs"),
    Cell(
        "sessions_per_gpu_without", "idle_s / turn_busy_without_s", "sessions", "compute alone, at 100 % load"
    ),
    Cell("sessions_per_gpu_with", "idle_s / turn_busy_with_s", "sessions", "compute alone, at 100 % load"),
    Cell(
        "disk_read_bytes_per_s",
        "turns_per_s * (1 - first_share) * disk_share * kv_bytes(reused_tokens) / compression",
        "bytes/s",
        "what returning sessions read from disk, all hosts together",
    ),
    Cell(
        "disk_load",
        "disk_read_bytes_per_s / (disk_bytes_per_s * replicas)",
        "share",
        "one disk of the given rate per replica, writes left out; near 1 requests queue for it",
    ),
    Cell(
        "write_bytes_per_s",
        "turns_per_s * kv_token_bytes * (new_tokens + output_tokens)",
        "bytes/s",
        "new KV written to the tiers; without admission, windows and states left out",
    ),
)

_COST = (
    Cell("turn_tokens", "context_tokens + output_tokens", "tokens", "read and written by one turn"),
    Cell(
        "cost_without",
        "turn_busy_without_s * gpu_hour_price / 3600 / turn_tokens * 1000000",
        "per 1M tokens",
        "GPU time at the given price, prompt and answer tokens, idle GPUs free",
    ),
    Cell(
        "storage_month",
        "ram_bytes / 1000000000 * ram_gb_month_price + disk_bytes / 1000000000 * disk_gb_month_price",
        "per month",
        "the recommended tiers at the given prices",
    ),
    Cell(
        "cost_storage",
        "storage_month / (turns_per_s * 2629800) / turn_tokens * 1000000",
        "per 1M tokens",
        "a month is 365.25 / 12 days of this traffic",
    ),
    Cell(
        "cost_with",
        "turn_busy_with_s * gpu_hour_price / 3600 / turn_tokens * 1000000 + cost_storage",
        "per 1M tokens",
        "GPU time and tiers",
    ),
    Cell(
        "keep_ram_s",
        "busy_s(reused_tokens, 0) * gpu_hour_price / 3600"
        " / (kv_bytes(reused_tokens) / 1000000000 * ram_gb_month_price / 2629800)",
        "s",
        "keeping the reused prefix in RAM is cheaper than computing it again if it returns sooner",
    ),
    Cell(
        "keep_disk_s",
        "busy_s(reused_tokens, 0) * gpu_hour_price / 3600"
        " / (kv_bytes(reused_tokens) / 1000000000 * disk_gb_month_price / 2629800)",
        "s",
        "the same for disk",
    ),
)

CELLS = breakeven.CELLS + _SIZES + _FITS + _TIERS + _TTFT + _LOAD + _COST
SHEET = Sheet(INPUTS, CELLS)
