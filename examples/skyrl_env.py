"""SkyRL-Gym environments as an Atropos environment.

    python -m shmbridge.producers.atropos --bridge run1 --step-rewards examples/skyrl_env.py serve \
        --env.skyrl_repo_id train.parquet --env.skyrl_env gsm8k_multi_turn --env.tokenizer_name DIR \
        --openai.base_url http://127.0.0.1:9004/v1 --openai.tokenizer_name DIR --env.use_wandb false
"""

from shmbridge.producers.skyrl_gym.adapter import SkyRLAdapter

if __name__ == "__main__":
    SkyRLAdapter.cli()
