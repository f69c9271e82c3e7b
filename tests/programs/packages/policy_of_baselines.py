"""stable-baselines3: PPO and DQN on an environment of one's own, with an evaluation callback, saved and loaded."""

import gymnasium
import numpy
import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor


class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (2,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, seed=5):
        super().reset(seed=seed)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = self.np_random.normal(0, 2), 0
        return self._seen(), {}

    def step(self, action):
        self.place += int(action) - 1 + 0.1 * self.np_random.normal()
        self.time += 1
        return self._seen(), -abs(self.place), False, self.time == 20, {}

    def _seen(self):
        return numpy.array([self.place, self.time / 20], dtype=numpy.float32)


torch.set_num_threads(1)
watch = EvalCallback(Monitor(Walk()), eval_freq=64, n_eval_episodes=3, best_model_save_path="best", verbose=0)
model = PPO(
    "MlpPolicy", Walk(), n_steps=64, batch_size=16, n_epochs=3, seed=3, device="cpu", policy_kwargs={"net_arch": [32]}
)
model.learn(256, callback=watch)
print(watch.best_mean_reward)
print(evaluate_policy(model, Monitor(Walk()), 4, return_episode_rewards=True))
model.save("ppo")
again = PPO.load("ppo", device="cpu")
print(
    [
        again.predict(numpy.array([place, 0.5], dtype=numpy.float32), deterministic=True)[0].item()
        for place in (-3, 0, 3)
    ]
)
torch.save(model.policy.state_dict(), "ppo.pt")
model = DQN(
    "MlpPolicy",
    Walk(),
    learning_starts=50,
    train_freq=4,
    batch_size=16,
    target_update_interval=64,
    seed=3,
    device="cpu",
)
model.learn(200)
print(model.num_timesteps, [p.detach().abs().sum().item() for p in model.policy.parameters()])
torch.save(model.policy.state_dict(), "dqn.pt")
