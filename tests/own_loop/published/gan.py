"""A GAN: two networks, two optimizers, one loop."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=8, help="input batch size")
parser.add_argument("--nz", type=int, default=16, help="size of the latent z vector")
parser.add_argument("--niter", type=int, default=2, help="number of epochs to train for")
opt = parser.parse_args()
print(opt)
device = torch.device("cpu")


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(opt.nz, 32, 4, 1, 0, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 32, 4, 2, 1, bias=False),
            nn.BatchNorm2d(32),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(32, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


netG = Generator().to(device)
netG.apply(weights_init)
netD = Discriminator().to(device)
netD.apply(weights_init)
print("parameters:", sum(p.numel() for net in (netG, netD) for p in net.parameters()))
criterion = nn.BCELoss()
fixed_noise = torch.randn(opt.batchSize, opt.nz, 1, 1, device=device)
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))

for epoch in range(opt.niter):
    for i, data in enumerate(torch.rand(4, opt.batchSize, 3, 16, 16), 0):
        netD.zero_grad()
        label = torch.full((opt.batchSize,), 1.0, device=device)
        errD_real = criterion(netD(data.to(device)), label)
        errD_real.backward()
        fake = netG(torch.randn(opt.batchSize, opt.nz, 1, 1, device=device))
        errD_fake = criterion(netD(fake.detach()), label.fill_(0.0))
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), label.fill_(1.0))
        errG.backward()
        optimizerG.step()
        print(f"[{epoch}/{opt.niter}][{i}] Loss_D: {errD_real + errD_fake:.4f} Loss_G: {errG:.4f}")
