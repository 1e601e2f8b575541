async def steps():
    for step in range(STEPS):
        await asyncio.to_thread(turn, step)


def train():
    start()
    asyncio.run(steps())
    finish()
