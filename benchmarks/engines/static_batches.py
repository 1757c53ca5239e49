"""The baseline without an engine: transformers' `generate` over static batches, in arrival order."""

from __future__ import annotations

from benchmarks import measure

BATCH_SIZE = 16


def load(request: measure.Request) -> tuple[measure.Generate, dict[str, str]]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    batch_size: int = request.options.get("batch_size", BATCH_SIZE)
    transformers.utils.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(request.model, dtype=torch.float32).eval()
    # No end-of-sequence: every request generates its full length, as in the other engines.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = pad = 0

    def generate_batch(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        input_ids = torch.full((len(prompts), width), pad)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, width - len(prompt) :] = 1
        # A static batch runs until its longest sequence is complete; extra tokens of the others are
        # discarded.
        generated = model.generate(
            input_ids, attention_mask=attention_mask, do_sample=False, max_new_tokens=max(max_tokens)
        )
        return [row[width : width + count].tolist() for row, count in zip(generated, max_tokens, strict=True)]

    @torch.inference_mode()
    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), batch_size):
            batch = slice(start, start + batch_size)
            outputs += generate_batch(prompts[batch], max_tokens[batch])
        return outputs

    return generate, {"torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    measure.run(load)
