"""verl's own output processor in a model of Megatron-Core."""

from __future__ import annotations

import torch
from with_megatron.gpt import TEMPERATURE, batch, gradients, model_of, own_scores
from with_verl.ray_double import import_verl


def check(tensor: int) -> None:
    import_verl("verl.models.mcore.model_forward_fused")
    from verl.models.mcore import model_forward_fused as verl

    from grpo_fused.integrations.verl import patch_verl

    model = model_of(tensor, sequence_parallel=True)
    g = torch.Generator().manual_seed(2)
    given = {name: x if name == "attention_mask" else x[:1] for name, x in batch().items()}  # verl packs into one row
    a, b = torch.randn(2, *given["labels"].shape, generator=g) * (given["loss_mask"] != 0)
    want = own_scores(model)
    theirs = gradients(model, (want[0][:1] * a).sum() + (want[1][:1] * b).sum())
    patch_verl()
    context = verl.FusedOutputProcessorContext(temperature=TEMPERATURE)
    out = model(**given, output_processor=verl.fused_output_processor, output_processor_context=context)
    mine = gradients(model, (out.log_probs * a[0]).sum() + (out.entropy * b[0]).sum())
    mask = given["loss_mask"][0] != 0
    for x, y in ((out.log_probs, want[0]), (out.entropy, want[1])):
        torch.testing.assert_close(x.masked_fill(~mask, 0.0).double(), y[0], rtol=1e-5, atol=1e-5)
    for name, x in mine.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
