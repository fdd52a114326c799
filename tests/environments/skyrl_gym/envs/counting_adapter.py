"""The adapter as a script, with an environment of the tests' own."""

import counting_env  # noqa: F401

from shmbridge.producers.skyrl_gym.adapter import SkyRLAdapter

if __name__ == "__main__":
    SkyRLAdapter.cli()
