"""Trains with Lightning, whose own launcher starts the second rank:
``lightning_alone.py raise`` fails there.
"""

import sys

import lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

FAULTY_RANK, FAULT_AT = 1, 3


class Model(BoringModel):
    """Fails in a step of its training, as it is told."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> object:
        if self.global_rank == FAULTY_RANK and batch_idx == FAULT_AT and sys.argv[1] == "raise":
            raise ValueError("batch 7 has no labels")
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        limit_train_batches=6,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Model())
    print("trained", flush=True)
