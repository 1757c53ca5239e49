"""The Grafana dashboards as data, one entry per panel. To add a panel for a metric, add a line to a row."""

from __future__ import annotations

from pagemill.monitoring.dashboards.board import FIRING, Row, board, gateways
from pagemill.monitoring.dashboards.panels import (
    BYTES,
    COUNT,
    PER_SECOND,
    RATIO,
    SECONDS,
    TOKENS_PER_SECOND,
    Panel,
    heat,
    lines,
    number,
)
from pagemill.monitoring.dashboards.queries import (
    GATEWAY,
    LANE,
    QUEUE,
    WORKER,
    Query,
    gauge,
    gauge_by,
    of_queue,
    once,
    quantile,
    quantiles,
    queue_total,
    rate,
    rate_by,
    series,
    total,
    total_rate,
)

ENDED = once(rate("queue_ended_jobs_total", QUEUE), "outcome")
SUCCEEDED = once(rate("queue_ended_jobs_total", f'{QUEUE}, outcome="succeeded"'), "outcome")
SUBMITTED = once(rate("queue_submitted_jobs_total", QUEUE))
WAITING = once(series("queue_waiting_jobs", LANE), "model, priority")
OLDEST = once(series("queue_oldest_job_age_seconds", LANE), "model, priority")
UNFINISHED = once(series("queue_jobs", f'{QUEUE}, state=~"waiting|delayed|running"'), "state")
READY = once(series("queue_workers", f'{QUEUE}, state="ready"'), "state")
DRAIN = f"queue:pagemill_queue_drain_seconds:rate5m{{{QUEUE}}}"
EXECUTIONS = once(rate("queue_rollout_executions_total", QUEUE), "model, side")
FAILURES = once(rate("queue_rollout_failures_total", QUEUE), "model, side")
ROLLOUT_STATE = once(series("queue_rollout_state", QUEUE), "model, state")
ACTIVE_BLOCKS = series("kv_cache_blocks", f'{WORKER}, state="active"')

BY_P50 = f'{WORKER}, result="p50"'
BY_P90 = f'{WORKER}, result=~"p50|p90"'
FENCED = f'{WORKER}, result="fenced"'
FORWARD = f'{WORKER}, phase="forward"'
CACHED = f'{WORKER}, source="prefix_cache"'
CLIENTS = f'{GATEWAY}, route!~"/healthz?|/readyz|/metrics|/openapi.json"'
"""Clients' requests, without the probes and scrapes that would dilute every ratio."""
FAILED = f'{CLIENTS}, status=~"5.."'

CALM = [(None, "green"), (1, "red")]
TIMED = "One block in 64 is timed."


def _last_hour(title: str, about: str, metric: str, selector: str = WORKER) -> Panel:
    query = Query(f"sum(increase({series(metric, selector)}[1h]))")
    return number(title, COUNT, about, query, steps=CALM, width=4)


# fmt: off
OVERVIEW_BOARD = board("overview", "overview", "Is work done, how fast, and what stands in the way.", [
    Row("At a glance", [
        number("Jobs waiting", COUNT, "Ready to be pulled, in the chosen queues for the chosen models.",
            Query(f"sum({WAITING})")),
        number("Oldest job", SECONDS, "Age of the job that has waited longest, since its submit.",
            Query(f"max({OLDEST})"), steps=[(None, "green"), (60, "orange"), (900, "red")]),
        number("Time to drain", SECONDS,
            "For all that is in the queue, at the rate of the last five minutes. Empty while nothing ends.",
            Query(f"max({DRAIN})")),
        number("KV cache in use", RATIO, "Active blocks / capacity of the fullest worker.",
            Query(f"max(pagemill_kv_cache_utilization_ratio{{{WORKER}}})"),
            steps=[(None, "green"), (0.9, "orange"), (0.98, "red")]),
        number("Generated", TOKENS_PER_SECOND, "Output tokens per second of all chosen workers.",
            total_rate("generated_tokens_total")),
        number("Jobs that succeed", RATIO, "Of the jobs that ended.",
            Query(f"sum({SUCCEEDED}) / (sum({ENDED}) > 0)"),
            steps=[(None, "red"), (0.95, "orange"), (0.99, "green")]),
        number("Ready workers", COUNT, "Live workers that pull jobs, by their own word in Redis.",
            Query(f"sum({READY})"),
            steps=[(None, "red"), (1, "green")]),
        number("Alerts firing", COUNT, "Warnings and worse.",
            Query(f"count({FIRING}) or vector(0)"),
            steps=[(None, "green"), (1, "red")]),
    ]),
    Row("Work", [
        lines("Jobs submitted and ended", PER_SECOND, "All producers and workers of the chosen queues.",
            Query(f"sum({SUBMITTED})", "submitted"), Query(f"sum by (outcome) ({ENDED})", "{{outcome}}"),
            width=12),
        lines("Tokens", TOKENS_PER_SECOND,
            "Prompt tokens by where their KV came from: computed, or the prefix cache.",
            total_rate("generated_tokens_total", "generated"),
            rate_by("source", "prompt_tokens_by_source_total", "prompt, {{source}}"), width=12),
        lines("Job time", SECONDS, "From submit to the committed end.",
            *quantiles("job_e2e_seconds", 0.5, 0.95)),
        lines("Time to first token", SECONDS,
            "From the engine's acceptance; the wait in the queue is not in it.",
            *quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99)),
        lines("KV cache in use", RATIO, "Active blocks / capacity.", gauge("kv_cache_utilization_ratio"),
            most=1),
    ]),
    Row("What stands in the way", [
        lines("Why no jobs are pulled", RATIO,
            "Share of time in which a worker could not pull, by what stood in the way, summed over workers.",
            rate_by("reason", "admission_blocked_seconds_total"), stacked=True, width=12),
        lines("Time of jobs", COUNT, "Average number of jobs, by the cause of their time; for one job: `pagemill why`.",
            rate_by("cause", "job_seconds_total"), stacked=True, width=12),
        lines("Workers by state", COUNT, "As the workers report it.", gauge_by("state", "worker_state"),
            stacked=True, width=12),
    ]),
])
KV_CACHE_BOARD = board(
    "kv-cache", "KV cache",
    "Every KV block is free, cached, active or reserved; the states sum to the capacity at every scrape.", [
    Row("Blocks", [
        lines("Blocks by state", COUNT,
            "free: nothing in it. cached: no reference, reusable by a prefix. active: in use. reserved:"
            " the null block, and blocks that wait for steps in flight.",
            gauge_by("state", "kv_cache_blocks"), total("kv_cache_capacity_blocks", "capacity"),
            stacked=True, width=12),
        heat("Utilization of every step", RATIO,
            "Observed at each step, so that a pool that is full between two scrapes is seen.",
            "kv_cache_step_utilization_ratio", width=12),
        lines("Utilization and occupancy", RATIO,
            "Shares of the capacity; the peak is of any step since the worker started.",
            gauge("kv_cache_utilization_ratio", "{{instance}} active"),
            gauge("kv_cache_occupancy_ratio", "{{instance}} active and cached"),
            gauge("kv_cache_peak_utilization_ratio", "{{instance}} peak"), most=1),
        lines("Waste", RATIO,
            "Token slots of active blocks that hold nothing: the last block of each sequence is not full.",
            gauge("kv_cache_waste_ratio"), most=1),
        lines("Blocks by window", COUNT,
            "Active blocks by the window of the layers that they are for; all: layers that read everything.",
            gauge_by("window", "kv_cache_window_blocks"), stacked=True),
        lines("Blocks of host memory", COUNT, "The prefix cache's host tier; empty without --host-cache-gib.",
            gauge_by("state", "kv_cache_host_blocks"), stacked=True),
    ]),
    Row("Worth", [
        lines("Sharing", "none", "References to each active block, on average: 1 without any sharing.",
            Query(f"{series('kv_cache_block_references')}"
                  f" / (sum without (state) ({ACTIVE_BLOCKS}) > 0)", "{{instance}}")),
        lines("Prefix hit rate", RATIO, "Tokens found / tokens looked up.",
            Query(f"sum by (instance) ({rate('prefix_cache_hit_tokens_total')})"
                  f" / (sum by (instance) ({rate('prefix_cache_queried_tokens_total')}) > 0)",
                  "{{instance}}"),
            most=1),
        lines("Tokens not computed again", TOKENS_PER_SECOND,
            "Prompt tokens whose KV came from the prefix cache.",
            rate_by("source", "prefix_cache_tier_hit_tokens_total")),
        lines("Shared blocks", COUNT, "Blocks with two or more references.", gauge("kv_cache_shared_blocks")),
        lines("Copies on write", PER_SECOND, "A sample writes into a block that another one shares.",
            rate_by("instance", "kv_cache_cow_copies_total")),
        lines("Blocks at a request's peak", COUNT,
            "What a request costs; those its samples share count for each.",
            *quantiles("request_peak_kv_blocks", 0.5, 0.95, 0.99)),
    ]),
    Row("Motion", [
        lines("Allocated, freed, evicted", PER_SECOND,
            "Blocks per second. Evictions: cached blocks taken for new tokens. Passed by windows:"
            " freed by running sequences.",
            total_rate("kv_cache_block_allocations_total", "allocated"),
            total_rate("kv_cache_block_frees_total", "freed"),
            total_rate("kv_cache_block_evictions_total", "evicted"),
            total_rate("kv_cache_window_frees_total", "left behind by windows")),
        lines("Preemptions", PER_SECOND,
            "Sequences put back to waiting, for lack of blocks or for a job of high priority.",
            total_rate("preemptions_total", "preempted"), total_rate("urgent_preemptions_total", "for urgent jobs")),
        lines("Tokens computed again", TOKENS_PER_SECOND,
            "What preemption costs. What the prefix cache still has is thrown away, and not computed again.",
            total_rate("preempted_tokens_total", "thrown away"),
            total_rate("preempted_tokens_recomputed_total", "computed again")),
        lines("Asked for and not had", PER_SECOND, "Sequences that needed blocks when there were none.",
            rate_by("instance", "kv_cache_allocation_failures_total")),
        lines("Requests that wait for blocks", COUNT, "Inside the engine; jobs in the queue are not in it.",
            Query(f'pagemill_requests_waiting{{{WORKER}, reason="kv"}}', "{{instance}}")),
        lines("Host tier copies", BYTES, "Bytes per second to the host tier (store) and back (load).",
            rate_by("direction", "kv_cache_host_copied_bytes_total")),
        lines("Host tier losses", PER_SECOND,
            "Blocks per second that the host tier evicted, and that it did not take.",
            total_rate("kv_cache_host_evictions_total", "evicted"),
            total_rate("kv_cache_host_skipped_blocks_total", "not taken")),
    ]),
    Row("Residency", is_collapsed=True, panels=[
        lines("A block's life", SECONDS, TIMED, *quantiles("kv_block_lifetime_seconds", 0.5, 0.95)),
        lines("Idle before eviction", SECONDS, f"Short: the pool is too small to keep prefixes. {TIMED}",
            *quantiles("kv_block_idle_before_evict_seconds", 0.5, 0.95)),
        lines("Idle before reuse", SECONDS, TIMED, *quantiles("kv_block_reuse_gap_seconds", 0.5, 0.95)),
    ]),
])
QUEUE_BOARD = board("queue", "queue", "What waits, for how long, and what becomes of it.", [
    Row("Backlog", [
        lines("Waiting by priority", COUNT, "Jobs ready to be pulled.",
            Query(f"sum by (priority) ({WAITING})", "{{priority}}"), stacked=True),
        lines("Waiting by model", COUNT, "Jobs ready to be pulled.",
            Query(f"sum by (model) ({WAITING})", "{{model}}"), stacked=True),
        lines("Oldest job by priority", SECONDS, "Since its submit.",
            Query(OLDEST, "{{queue}} {{model}} {{priority}}")),
        lines("Jobs by state", COUNT,
            "delayed: jobs for later, retries included. dead: kept until they are purged.",
            queue_total("state", "queue_jobs")),
        lines("Submitted and ended", PER_SECOND, "When the first stays above the second, the queue grows.",
            Query(f"sum({SUBMITTED})", "submitted"), Query(f"sum({ENDED})", "ended")),
        lines("Time to drain", SECONDS,
            "For all that is in the queue, at the present rate. Empty while nothing ends.",
            Query(DRAIN, "{{queue}}"),
            of_queue("queue_estimated_drain_seconds", "{{queue}}, workers' own estimate")),
    ]),
    Row("Flow", [
        heat("Wait in the queue", SECONDS, "From submit to pull, of the jobs pulled then.",
            "job_queue_wait_seconds"),
        lines("Wait in the queue", SECONDS, "From submit to pull.",
            *quantiles("job_queue_wait_seconds", 0.5, 0.95, 0.99)),
        lines("Estimates met", RATIO,
            "Of the jobs that succeeded and had an estimate. Half should end by p50, nine of ten by"
            " p90.",
            Query(f"sum({rate('job_estimates_total', BY_P50)}) / sum({rate('job_estimates_total')})", "by p50"),
            Query(f"sum({rate('job_estimates_total', BY_P90)}) / sum({rate('job_estimates_total')})", "by p90"),
            most=1),
        lines("Estimated and actual time", RATIO,
            "From submit to end, over the median that was estimated: 100 % is as estimated.",
            *quantiles("job_estimate_ratio", 0.1, 0.5, 0.9)),
        lines("Ended by outcome", PER_SECOND, "All workers of the chosen queues.",
            Query(f"sum by (outcome) ({ENDED})", "{{outcome}}"), stacked=True),
        lines("First and redelivered", PER_SECOND, "redelivered: an earlier execution had started.",
            rate_by("delivery", "jobs_received_total")),
        lines("Retries", PER_SECOND, "Executions that ended in a retryable error.",
            rate_by("reason", "job_retries_total")),
        lines("Failures by code", PER_SECOND,
            "Executions that ended with an error; those that are retried included. Only codes that occur.",
            Query(f"sum by (code) ({rate('job_failures_total')}) > 0", "{{code}}")),
        lines("Webhooks", COUNT,
            "To be delivered. later: after a failure, or by another worker. Paused receivers failed repeatedly; the"
            " workers' logs have the reason.",
            Query(f"max by (state) ({series('webhooks_pending')})", "{{state}}"),
            Query(f"max({series('webhook_receivers_paused')})", "receivers paused")),
    ]),
    Row("Pulling", [
        lines("Why no jobs are pulled", RATIO,
            "Share of time in which a worker could not pull, summed over workers. kv and rows: it is full,"
            " which is as it should be under load.", rate_by("reason", "admission_blocked_seconds_total"),
            stacked=True),
        lines("Room for jobs", COUNT, "What the last pull asked for at most.",
            gauge("admission_credit_sequences", "{{instance}} sequences"),
            gauge("admission_credit_blocks", "{{instance}} blocks")),
        lines("Workers by state, and paused", COUNT, "Live workers by their own word in Redis.",
            queue_total("state", "queue_workers"), of_queue("queue_paused", "{{queue}} paused")),
    ]),
    Row("Rollouts", [
        lines("Failures by side", RATIO,
            "Of the executions that ended; hand-backs, cancels and deadlines aside.",
            Query(f"{FAILURES} / {EXECUTIONS}", "{{model}} {{side}}")),
        lines("Run time by side", SECONDS,
            "From pull to commit, median and 90th percentile of the latest 256.",
            of_queue("queue_rollout_run_seconds", "{{model}} {{side}} {{quantile}}",
                     "model, side, quantile")),
        lines("Executions by side", PER_SECOND,
            "Those that ended in success, in an error or with their worker.",
            Query(EXECUTIONS, "{{model}} {{side}}")),
        lines("Share and agreement", RATIO,
            "The canary's share of the jobs, and the share of equal outputs when they were last compared.",
            of_queue("queue_rollout_share_ratio", "{{model}} share", "model"),
            of_queue("queue_rollout_agreement_ratio", "{{model}} agreement", "model")),
        lines("Workers by side", COUNT, "Live ones. A side without any is served by the other.",
            of_queue("queue_rollout_workers", "{{model}} {{side}}", "model, side")),
        lines("State", COUNT, "Open, halted (by a command or for its failures), taken back or ended.",
            Query(f"{ROLLOUT_STATE} == 1", "{{model}} {{state}}")),
    ]),
])
ENGINE_BOARD = board("engine", "engine", "Steps, requests, latencies and the device.", [
    Row("Requests", [
        lines("Running and waiting", COUNT,
            "Sequences that run, and requests inside the engine that wait, by what the first of them lacks.",
            total("requests_running", "running"),
            gauge_by("reason", "requests_waiting", "waiting for {{reason}}"),
            total("max_num_seqs", "rows")),
        lines("Tokens", TOKENS_PER_SECOND,
            "Through the model: prompts, drafts, generated and regenerated ones. An accepted draft saves a step.",
            total_rate("generated_tokens_total", "generated"),
            total_rate("engine_computed_tokens_total", "through the model"),
            total_rate("engine_discarded_tokens_total", "sampled too late"),
            total_rate("draft_tokens_total", "drafted"),
            total_rate("draft_tokens_accepted_total", "drafts accepted")),
        lines("Ended by reason", PER_SECOND, "Requests per second.",
            rate_by("finish_reason", "requests_completed_total"), stacked=True),
    ]),
    Row("Latency", [
        lines("Time to first token", SECONDS, "From the engine's acceptance of a request.",
            *quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99)),
        lines("Between two tokens", SECONDS, "Of a sequence; every token counts.",
            *quantiles("inter_token_latency_seconds", 0.5, 0.95, 0.99)),
        lines("Per output token", SECONDS, "The mean of each request; every request counts once.",
            *quantiles("time_per_output_token_seconds", 0.5, 0.95, 0.99)),
        lines("A request's phases, p95", SECONDS,
            "wait: until its first step. inference: prefill and decode. e2e: all of it.",
            *(quantile(f"request_{phase}_seconds", 0.95, phase)
              for phase in ("wait", "prefill", "decode", "inference", "e2e"))),
        heat("Time to first token", SECONDS, "All requests.", "time_to_first_token_seconds"),
        heat("Between two tokens", SECONDS, "All tokens.", "inter_token_latency_seconds"),
    ]),
    Row("Steps", [
        lines("Step time by phase", SECONDS,
            "Mean seconds per step. On a GPU phases of different steps overlap.",
            Query(f"sum by (phase) ({rate('engine_step_seconds_sum')})"
                  f" / on () group_left () (sum({rate('engine_steps_total')}) > 0)", "{{phase}}"),
            stacked=True),
        lines("Forward pass by kind of step", SECONDS, "prefill: no row decodes. decode: all do.",
            *(quantile("engine_step_seconds", q, f"{{{{kind}}}} p{q * 100:.0f}", "le, kind", FORWARD)
              for q in (0.5, 0.95))),
        lines("Steps", PER_SECOND, "graph: replayed from a CUDA graph.",
            rate_by("mode", "engine_graph_steps_total"), total_rate("engine_steps_failed_total", "raised")),
        heat("Sequences in a step", COUNT, "How full the batch is.", "engine_batch_size"),
        heat("Use of the token budget", RATIO, "Tokens in a step / max_num_batched_tokens.",
            "engine_batch_token_budget_ratio"),
        lines("Tokens in steps by kind", TOKENS_PER_SECOND, "Prompt tokens come in prefill and mixed steps.",
            rate_by("kind", "engine_step_tokens_sum"), stacked=True),
        lines("Busy", RATIO, "Share of time inside steps; the rest had nothing to do.",
            Query(rate("engine_busy_seconds_total"), "{{instance}}"), most=1),
        lines("Age of the last step", SECONDS, "0 while nothing runs. More than a minute: the engine hangs.",
            Query(f"(time() - {series('engine_last_step_timestamp_seconds')})"
                  f" * ({series('requests_running')} > bool 0)", "{{instance}}")),
        lines("NaN", PER_SECOND, "Rows whose logits were not finite. Such a request fails alone.",
            rate_by("instance", "invalid_logits_total")),
    ]),
    Row("Images", is_collapsed=True, panels=[
        lines("Images", PER_SECOND,
            "encoded: the vision encoder read them. cached: their vectors, or their KV blocks, were in memory.",
            total_rate("images_encoded_total", "encoded"), total_rate("image_cache_hits_total", "cached")),
        lines("Vision encoder", RATIO, "Share of time, in which no step runs.",
            rate_by("instance", "image_encoder_seconds_total"), most=1),
        lines("Encoded images in memory", BYTES, "At most media_cache_bytes, and what a request needs next.",
            gauge("image_cache_bytes")),
    ]),
    Row("Device", is_collapsed=True, panels=[
        lines("Memory by use", BYTES, "As far as the engine knows it.",
            gauge_by("use", "device_memory_bytes"), stacked=True),
        lines("Process memory", BYTES, "Of the worker's process.",
            Query(f"process_resident_memory_bytes{{{WORKER}}}", "{{instance}}")),
        lines("GPU busy", "percent", "From the DCGM exporter; empty without one.",
            Query("DCGM_FI_DEV_GPU_UTIL", "{{Hostname}} GPU {{gpu}}"), most=100),
    ]),
])
RELIABILITY_BOARD = board("reliability", "reliability", "Is every job done once, and does Redis hold.", [
    Row("The last hour", [
        _last_hour("Leases lost", "Jobs that went to another worker.", "leases_lost_total"),
        _last_hour("Commits fenced", "Results rejected as stale.", "result_commits_total", FENCED),
        _last_hour("Retries", "Executions that ended in a retryable error.", "job_retries_total"),
        _last_hour("Account errors", "Contradictions in the KV block accounts: a bug.",
            "kv_cache_accounting_errors_total"),
        _last_hour("Steps raised", "Their requests ran again.", "engine_steps_failed_total"),
        number("Keys evicted", COUNT, "By the server since its start. Anything but 0 means lost jobs.",
            Query(f"max({once(series('redis_evicted_keys_total', QUEUE))})"), steps=CALM, width=4),
    ]),
    Row("Leases and commits", [
        lines("Leases held", COUNT, "A queue that has more than its workers hold has lapsed ones.",
            gauge_by("instance", "leases_held"), of_queue("queue_leases", "{{queue}}, all workers")),
        lines("Renewals", PER_SECOND, "lost: another worker has the job. error: Redis did not answer.",
            rate_by("result", "lease_renewals_total")),
        lines("Commits", PER_SECOND,
            "fenced: the result is discarded. already_done: repeated after a lost reply.",
            rate_by("result", "result_commits_total")),
        lines("Time of a commit", SECONDS, "A round trip with all ends of that moment.",
            *quantiles("result_commit_seconds", 0.5, 0.99)),
        lines("Checkpoints", PER_SECOND, "refused: a stale token, or a wrong offset.",
            rate_by("result", "progress_writes_total")),
        lines("Work saved and lost", TOKENS_PER_SECOND, "discarded: generated without use.",
            total_rate("resumed_tokens_total", "taken over from checkpoints"),
            total_rate("regenerated_tokens_total", "generated again"),
            rate_by("reason", "discarded_tokens_total", "discarded: {{reason}}")),
    ]),
    Row("Redis as workers see it", [
        lines("Redis reachable", COUNT, "1 while it answers that worker.", gauge("redis_up"), most=1),
        lines("Round trips, p99", SECONDS, "By the transition that they carried, one or many.",
            quantile("redis_command_seconds", 0.99, "{{command}}", "le, command")),
        lines("Errors and reconnects", PER_SECOND, "Calls that failed.",
            rate_by("kind", "redis_errors_total"), total_rate("redis_reconnects_total", "reconnects")),
        lines("Clock skew", SECONDS, "The server's clock minus the worker's; deadlines are off by it.",
            gauge("redis_clock_skew_seconds")),
        lines("Results held", COUNT, "In memory until Redis takes them. At 1,000 the engine stops.",
            gauge("redis_result_buffer_jobs")),
        lines("Bytes held", BYTES, "In memory until Redis takes them. At 256 MB the engine stops.",
            gauge("redis_result_buffer_bytes")),
        lines("Oldest running job", SECONDS, "Since its pull.", gauge("oldest_running_job_age_seconds")),
    ]),
    Row("The server", [
        lines("Memory", BYTES, "At the lower limit new jobs are rejected; what is above is for running jobs.",
            of_queue("redis_memory_used_bytes", "{{queue}} used"),
            Query(f"max by (queue) (pagemill_redis_memory_max_bytes{{{QUEUE}}}) > 0", "{{queue}} limit"),
            of_queue("queue_memory_limit_bytes", "{{queue}} submits up to")),
        lines("What holds the memory", BYTES,
            "Estimated from random keys. records: of jobs and batches; other: of other queues and software.",
            queue_total("kind", "queue_memory_bytes"), stacked=True),
        lines("Rejected for lack of memory", PER_SECOND,
            "Clients that wait for room submit again, which counts again.",
            Query(once(rate("queue_memory_rejections_total", QUEUE)), "{{queue}}")),
        lines("Waits for the disk", PER_SECOND,
            "Writes that waited for the append-only file, and whether there is one.",
            Query(once(rate("redis_aof_delayed_fsync_total", QUEUE)), "{{queue}} delayed fsyncs"),
            of_queue("redis_aof_enabled", "{{queue}} append-only file")),
        lines("Clients and replicas", COUNT, "blocked: idle workers wait for the doorbell.",
            of_queue("redis_connected_clients", "{{queue}} clients"),
            of_queue("redis_blocked_clients", "{{queue}} blocked"),
            of_queue("redis_connected_replicas", "{{queue}} replicas")),
        lines("Scrapes without a source", RATIO, "The figures of that source are missing from the scrape.",
            rate_by("source", "scrape_source_errors_total")),
    ]),
])
DATASET_RUNS_BOARD = board(
    "dataset-runs", "dataset runs",
    "How the rows go, what they cost, and what comes out.", [
    Row("Progress", [
        number("Rows left", COUNT, "Unfinished jobs of the chosen queues.",
            Query(f"sum({UNFINISHED})"),
            width=6),
        number("Rows per minute", COUNT, "Jobs that end.", Query(f"60 * sum({ENDED})"), width=6),
        number("Time left", SECONDS, "At the rate of the last five minutes.", Query(f"max({DRAIN})"),
            width=6),
        number("Busy seconds per 1,000 rows", SECONDS,
            "What a thousand rows cost, in seconds of a worker that works, over the last hour. Multiply by"
            " a worker's price per second.", Query("pagemill_busy_seconds_per_1000_jobs:rate1h"), width=6),
        lines("Rows by outcome", PER_SECOND, "All workers.",
            Query(f"sum by (outcome) ({ENDED})", "{{outcome}}"), stacked=True),
        lines("Rows by worker", PER_SECOND, "Ends that each worker committed.",
            rate_by("instance", "jobs_finished_total"), stacked=True),
        lines("Executions per row", COUNT, "1 when nothing is retried.",
            Query(f"sum({rate('job_attempts_sum')}) / (sum({rate('job_attempts_count')}) > 0)", "mean")),
    ]),
    Row("Shape of the rows", [
        heat("Prompt length", COUNT, "Tokens.", "request_prompt_tokens"),
        heat("Output length", COUNT, "Tokens.", "request_generated_tokens"),
        heat("max_tokens", COUNT, "What rows ask for; unused room is not kept.", "request_params_max_tokens"),
        lines("Shared prompts", RATIO, "Rows that begin alike share their KV blocks.",
            Query(f"sum({rate('prompt_tokens_by_source_total', CACHED)})"
                  f" / (sum({rate('prompt_tokens_by_source_total')}) > 0)", "prompt tokens that were cached"),
            most=1),
        lines("Tokens by source", TOKENS_PER_SECOND, "Where the tokens of rows come from.",
            rate_by("source", "prompt_tokens_by_source_total", "prompt, {{source}}"),
            total_rate("generated_tokens_total", "generated"), total_rate("resumed_tokens_total", "resumed")),
        lines("Size of jobs and results", BYTES, "In Redis.", quantile("job_payload_bytes", 0.95, "job p95"),
            quantile("job_result_bytes", 0.95, "result p95")),
    ]),
    Row("What comes out", [
        lines("Structured outputs", PER_SECOND,
            "truncated: max_tokens came before the end. invalid: it does not match.",
            rate_by("result", "structured_outputs_total"), stacked=True),
        lines("Grammars", SECONDS, "Time to compile structured_outputs; most come from the cache.",
            *quantiles("grammar_compile_seconds", 0.5, 0.99)),
        lines("Grammar cache", PER_SECOND, "Grammars that were compiled already.",
            rate_by("result", "grammar_cache_total")),
    ]),
])
GATEWAY_BOARD = board(
    "gateway", "gateway",
    "What is asked over HTTP, how it is answered, and who is turned away.", [
    Row("Requests", [
        lines("Answers by status", PER_SECOND,
            "499: the client was gone before its answer. Probes and scrapes are left out.",
            rate_by("status", "gateway_requests_total", selector=CLIENTS), stacked=True),
        lines("Answers by route", PER_SECOND, "(none): rejected before it had a route, or an unknown route.",
            rate_by("route", "gateway_requests_total", selector=CLIENTS), stacked=True),
        lines("Share of errors", RATIO, "Answers with a status of 500 and above. Empty while there is none.",
            Query(f"sum by (instance) ({rate('gateway_requests_total', FAILED)})"
                  f" / sum by (instance) ({rate('gateway_requests_total', CLIENTS)})", "{{instance}}")),
        lines("Time to answer by route, p95", SECONDS,
            "From the head of a request to the end of its answer; of a stream, to its end.",
            quantile("gateway_request_seconds", 0.95, "{{route}}", "route, le", CLIENTS)),
        lines("Refused", PER_SECOND,
            "rate: a key's own limit. queue_full: the queue's. busy: requests beyond --max-in-flight.",
            rate_by("reason", "gateway_refused_total", selector=GATEWAY), stacked=True),
        lines("Cancelled jobs", PER_SECOND, "Jobs that were ended because no client waited for them any more.",
            total_rate("gateway_cancelled_jobs_total", "cancelled", selector=GATEWAY)),
    ]),
    Row("Streams", [
        heat("First token", SECONDS,
            "From a request's head to the first token of its stream: the wait in the queue is in it.",
            "gateway_stream_first_token_seconds", selector=GATEWAY),
        lines("First token", SECONDS, "From a request's head to the first token of its stream.",
            *quantiles("gateway_stream_first_token_seconds", 0.5, 0.95, 0.99, selector=GATEWAY)),
        lines("Streams, and those that broke off", PER_SECOND,
            "A stream that breaks off has been answered 200 already: only this metric shows it.",
            total_rate("gateway_stream_first_token_seconds_count", "begun", selector=GATEWAY),
            total_rate("gateway_stream_errors_total", "ended by an error", selector=GATEWAY)),
    ]),
    Row("Load", [
        lines("In progress", COUNT, "Requests beyond --max-in-flight are rejected as busy.",
            gauge("gateway_requests_in_flight", "{{instance}} requests", selector=GATEWAY),
            gauge("gateway_streams", "{{instance}} streams", selector=GATEWAY),
            gauge("gateway_batches_running", "{{instance}} batches", selector=GATEWAY)),
        lines("Connections", COUNT,
            "Open ones. Beyond --max-connections the one that has waited longest for a request is closed.",
            gauge("gateway_connections", selector=GATEWAY)),
        lines("Tokens", TOKENS_PER_SECOND, "As the answers count them; jobs of batches are not in it.",
            rate_by("kind", "gateway_tokens_total", selector=GATEWAY)),
    ]),
], gateways())
BOARDS = [
    OVERVIEW_BOARD, KV_CACHE_BOARD, QUEUE_BOARD, ENGINE_BOARD, RELIABILITY_BOARD, DATASET_RUNS_BOARD,
    GATEWAY_BOARD,
]
# fmt: on
