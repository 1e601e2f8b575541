async def steps():
    for step in range(STEPS):
        turn(step)
        await asyncio.sleep(0)


def train():
    start()
    asyncio.run(steps())
    finish()
