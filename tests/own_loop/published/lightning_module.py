"""A LightningModule and a Trainer."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(L.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, width), nn.ReLU(), nn.Linear(width, 3))
        self.decoder = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 28 * 28))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


model = LitAutoEncoder()
print("parameters:", sum(p.numel() for p in model.parameters()))
train_loader = DataLoader(TensorDataset(torch.rand(64, 1, 28, 28)), batch_size=16)
trainer = L.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(model=model, train_dataloaders=train_loader)
