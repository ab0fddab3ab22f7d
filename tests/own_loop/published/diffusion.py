"""A denoising diffusion model with an average of its weights."""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, t):
        freqs = torch.exp(torch.arange(self.dim // 2, device=t.device) * -(math.log(10000) / (self.dim // 2 - 1)))
        emb = t[:, None].float() * freqs[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class ResBlock(nn.Module):
    def __init__(self, dim, dim_out, time_dim):
        super().__init__()
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time_dim, dim_out))
        self.block1 = nn.Sequential(nn.GroupNorm(4, dim), nn.SiLU(), nn.Conv2d(dim, dim_out, 3, padding=1))
        self.block2 = nn.Sequential(nn.GroupNorm(4, dim_out), nn.SiLU(), nn.Conv2d(dim_out, dim_out, 3, padding=1))
        self.skip = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, t):
        return self.block2(self.block1(x) + self.time(t)[:, :, None, None]) + self.skip(x)


class Unet(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.time_mlp = nn.Sequential(SinusoidalPosEmb(dim), nn.Linear(dim, dim * 4), nn.SiLU())
        self.init_conv, self.final = nn.Conv2d(3, dim, 3, padding=1), nn.Conv2d(dim, 3, 1)
        self.downs = nn.ModuleList([ResBlock(dim, dim * 2, dim * 4), ResBlock(dim * 2, dim * 4, dim * 4)])
        self.mid = ResBlock(dim * 4, dim * 4, dim * 4)
        self.ups = nn.ModuleList([ResBlock(dim * 8, dim * 2, dim * 4), ResBlock(dim * 4, dim, dim * 4)])

    def forward(self, x, time):
        x, t, skips = self.init_conv(x), self.time_mlp(time), []
        for down in self.downs:
            x = down(x, t)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.mid(x, t)
        for up in self.ups:
            x = up(torch.cat((F.interpolate(x, scale_factor=2), skips.pop()), dim=1), t)
        return self.final(x)


class GaussianDiffusion(nn.Module):
    def __init__(self, model, timesteps=100):
        super().__init__()
        self.model, self.timesteps = model, timesteps
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - torch.linspace(1e-4, 0.02, timesteps), 0))

    def forward(self, img):
        t = torch.randint(0, self.timesteps, (img.shape[0],), device=img.device)
        noise, a = torch.randn_like(img), self.alphas_cumprod[t][:, None, None, None]
        return F.mse_loss(self.model(a.sqrt() * img + (1 - a).sqrt() * noise, t), noise)


def main(args):
    diffusion = GaussianDiffusion(Unet())
    print("parameters", sum(p.numel() for p in diffusion.parameters()))
    ema = copy.deepcopy(diffusion).requires_grad_(False)
    opt = torch.optim.Adam(diffusion.parameters(), lr=8e-5, betas=(0.9, 0.99))
    for step in range(args.train_num_steps):
        for _ in range(args.gradient_accumulate_every):
            loss = diffusion(torch.rand(args.batch, 3, 16, 16)) / args.gradient_accumulate_every
            loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for old, new in zip(ema.parameters(), diffusion.parameters()):
                old.lerp_(new, 0.005)
        print(f"{step}: {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_num_steps", type=int, default=4)
    parser.add_argument("--gradient_accumulate_every", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    main(parser.parse_args())
