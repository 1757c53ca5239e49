// Generated from the declarations of the Python package: python -m tests.producer.test_typescript

export interface ErrorInfo {
  code: string;
  message: string;
  cause?: string;
  retryable?: boolean;
  partial?: Output[];
}

export interface Function {
  name: string;
  description?: string | null;
  parameters?: Record<string, unknown> | null;
  strict?: boolean | null;
}

export interface FunctionCall {
  name: string;
  arguments?: string;
}

export interface ImagePart {
  type: "image_url";
  image_url: ImageUrl;
}

export interface ImageUrl {
  url: string;
  detail?: "auto" | "low" | "high" | null;
}

export interface Job {
  n?: number;
  length_penalty?: number;
  early_stopping?: boolean | "never";
  max_tokens?: number | null;
  min_tokens?: number;
  temperature?: number;
  top_k?: number;
  top_p?: number;
  min_p?: number;
  seed?: number | null;
  stop?: string[];
  stop_token_ids?: number[];
  include_stop_str_in_output?: boolean;
  ignore_eos?: boolean;
  presence_penalty?: number;
  frequency_penalty?: number;
  repetition_penalty?: number;
  logit_bias?: Record<string, number>;
  allowed_token_ids?: number[] | null;
  bad_words?: string[];
  logprobs?: number | null;
  prompt_logprobs?: number | null;
  truncate_prompt_tokens?: number | null;
  skip_special_tokens?: boolean;
  structured_outputs?: StructuredOutputs | null;
  thinking_token_budget?: number | null;
  label_probs?: "product" | "mean" | "constrained" | null;
  tools?: Tool[] | null;
  tool_choice?: "none" | "auto" | "required" | NamedToolChoice | null;
  parallel_tool_calls?: boolean | null;
  chat_template_kwargs?: Record<string, unknown> | null;
  reasoning_effort?: "none" | "minimal" | "low" | "medium" | "high" | "xhigh" | null;
  separate_reasoning?: boolean | null;
  prompt?: string | null;
  messages?: Message[] | null;
  prompt_token_ids?: number[] | null;
  model: string;
  priority?: "high" | "normal" | "low";
  tenant?: string;
  deadline?: number | null;
  ttl?: number | null;
  delay?: number | null;
  run_at?: number | null;
  timeout?: number | null;
  max_attempts?: number;
  idempotency_key?: string | null;
  key?: string | null;
  metadata?: Record<string, unknown> | null;
  stream?: boolean;
  keep_input?: boolean;
  webhook?: string | null;
  traceparent?: string | null;
}

export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  content?: string | (TextPart | ImagePart)[] | null;
  tool_calls?: ToolCall[] | null;
  name?: string | null;
  tool_call_id?: string | null;
  reasoning?: string | null;
}

export interface NamedToolChoice {
  type?: "function";
  function: NamedFunction;
}

export interface Output {
  index: number;
  text?: string;
  token_ids?: number[];
  finish_reason?: "stop" | "length" | null;
  logprobs?: PositionLogprobs[] | null;
  logprob?: number | null;
  label?: string | null;
  label_probs?: Record<string, number> | null;
  parsed?: unknown;
  reasoning?: string | null;
  tool_calls?: ToolCall[];
}

export interface PositionLogprobs {
  chosen: TokenLogprob;
  top?: TokenLogprob[];
}

export interface Result {
  id: string;
  outputs: Output[];
  usage?: Usage;
  model: string;
  seed?: number | null;
  tier?: string;
  fingerprint?: string;
  attempt?: number;
  resumed_tokens?: number;
  copied_from?: string | null;
  timing?: Timing;
  prompt_logprobs?: (PositionLogprobs | null)[] | null;
  metadata?: Record<string, unknown> | null;
  rows?: Rows | null;
  labels?: string[] | null;
  warnings?: string[] | null;
}

export interface Rows {
  dtype: "float32" | "float16";
  shape: [number, number];
  data: string;
}

export interface StructuredOutputs {
  choice?: string[] | null;
  regex?: string | null;
  json?: string | null;
  grammar?: string | null;
}

export interface TextPart {
  type: "text";
  text: string;
}

export interface Timing {
  queue_s?: number | null;
  ttft_s?: number | null;
  e2e_s?: number | null;
}

export interface TokenLogprob {
  token_id: number;
  logprob: number | null;
  text?: string;
}

export interface Tool {
  type?: "function";
  function: Function;
}

export interface ToolCall {
  id: string;
  type?: "function";
  function: FunctionCall;
}

export interface Usage {
  prompt_tokens?: number;
  completion_tokens?: number;
  cached_tokens?: number;
  reasoning_tokens?: number | null;
}

export interface NamedFunction {
  name: string;
}

/** Fields of jobs that this client refuses. */
export const UNSUPPORTED = ["adapter", "after", "beam_width", "best_of", "continuations", "dedupe", "dimensions", "documents", "inputs", "on_parent_failure", "prompt_name", "revision", "rows_dtype", "task", "truncate", "when"];
