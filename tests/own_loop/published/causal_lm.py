"""Fine-tunes a causal language model from a local configuration."""

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, get_linear_schedule_with_warmup

CONFIG = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)


class Lines(Dataset):
    def __init__(self, n=16, length=24):
        self.ids = torch.randint(0, 128, (n, length))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones_like(self.ids[i]), "labels": self.ids[i]}


device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).to(device)
model.config.use_cache = False
print(f"parameters: {model.num_parameters()}")
loader = DataLoader(Lines(), batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
scheduler = get_linear_schedule_with_warmup(optimizer, 0, 2 * len(loader))

model.train()
for epoch in range(2):
    for step, batch in enumerate(loader):
        batch = {k: v.to(device) for k, v in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"epoch {epoch} step {step} loss {loss.item():.3f}")
