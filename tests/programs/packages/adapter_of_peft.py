"""peft: LoRA with dropout on a small language model; the adapter saved, loaded, and merged; the rest stays frozen."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
base = GPT2LMHeadModel(config).double()
start = {name: value.clone() for name, value in base.state_dict().items()}
lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM")
model = get_peft_model(base, lora)
model.print_trainable_parameters()
loader = DataLoader(torch.randint(1, 40, (50, 8)), batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 0.01)
for epoch in range(2):
    for tokens in loader:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(epoch, loss.item())
model.save_pretrained("adapter")
model.eval()
probe = torch.arange(1, 17).view(2, 8)
with torch.no_grad():
    wanted = model(input_ids=probe).logits
    fresh = GPT2LMHeadModel(config).double()
    fresh.load_state_dict(start)
    again = PeftModel.from_pretrained(fresh, "adapter").eval()
    print(torch.equal(again(input_ids=probe).logits, wanted), wanted.sum().item())
    merged = model.merge_and_unload()
    print(torch.allclose(merged(input_ids=probe).logits, wanted))
torch.save(merged.state_dict(), "merged.pt")
