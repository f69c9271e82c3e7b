"""torchvision, as its detection reference: RetinaNet on images of several sizes, losses in the model, boxes out."""

import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


def sample(index):
    height, width = 48 + 8 * (index % 3), 64 - 8 * (index % 2)
    corner = torch.rand(2) * 20
    image = torch.rand(3, height, width)
    box = torch.cat([corner, corner + 12 + 10 * torch.rand(2)])
    return image, {"boxes": box[None], "labels": torch.tensor([1 + index % 2])}


samples = [sample(index) for index in range(10)]
backbone = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, 4, 1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, 2, 1)
)
backbone.out_channels = 16
anchors = AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
model = RetinaNet(backbone, 3, anchor_generator=anchors, min_size=64, max_size=96, detections_per_img=3)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
loader = DataLoader(samples[:7], 3, shuffle=True, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
for epoch in range(2):
    model.train()
    for images, targets in loader:
        losses = model(list(images), [dict(target) for target in targets])
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, {name: value.item() for name, value in losses.items()})
    model.eval()
    with torch.no_grad():
        found = model([image for image, _ in samples[7:]])
    kept = [
        torchvision.ops.box_iou(one["boxes"], target["boxes"])
        for one, (_, target) in zip(found, samples[7:], strict=True)
    ]
    print([one["scores"].tolist() for one in found], [value.max().item() if value.numel() else 0.0 for value in kept])
torch.save(model.state_dict(), "model.pth")
