// Copies the queue's Lua scripts next to the compiled client, from PAGEMILL_LUA or this repository.
import { cpSync } from "node:fs";
import { fileURLToPath } from "node:url";

const source = process.env.PAGEMILL_LUA ?? fileURLToPath(new URL("../../producer/wire/lua", import.meta.url));
cpSync(source, fileURLToPath(new URL("dist/lua", import.meta.url)), { recursive: true });
