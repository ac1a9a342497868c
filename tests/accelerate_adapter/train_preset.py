"""An ordinary program: what it is told about layout and precision it takes from whoever started it."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from hyperpod_plugins.accelerate import HyperPodPlugin

accelerator = HyperPodPlugin.from_environ().accelerator()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.w2(torch.relu(self.w1(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.linspace(-1, 1, 24 * 16).view(24, 16), batch_size=4)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
losses = []
for batch in loader:
    loss = nn.functional.mse_loss(net(batch), batch)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(accelerator.reduce(loss.detach(), "mean")))
if accelerator.is_main_process:
    report = {
        "layout": list(accelerator.topology.shape),
        "precision": accelerator.plugin.config.precision,
        "recomputes": accelerator.plugin.config.activation_checkpointing != "none",
        "offloads": accelerator.plugin.config.sm_activation_offloading,
        "float8": type(net.layers[0].w1).__name__ == "Float8Linear",
        "backend": torch.distributed.get_backend(),
        "losses": losses,
    }
    Path(sys.argv[1]).write_text(json.dumps(report))
accelerator.end_training()
