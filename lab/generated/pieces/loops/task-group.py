async def one(step):
    await asyncio.sleep(0)
    turn(step)


async def steps():
    for step in range(STEPS):
        async with asyncio.TaskGroup() as group:
            group.create_task(one(step))
            group.create_task(asyncio.sleep(0.01))


def train():
    start()
    asyncio.run(steps())
    finish()
