// Assembles a script from its files as producer/wire/server/scripts.py does.
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";

/** The source of a script in a folder such as producer/wire/lua. */
export function sourceOf(folder: string, script: string): string {
  const seen = new Set<string>();
  const read = (file: string) => readFileSync(join(folder, `${file}.lua`), "utf8");
  const features = readdirSync(join(folder, "features")).sort().map((file) => `features/${file.slice(0, -".lua".length)}`);
  const sections = (hook: string) => features.filter((file) => read(file).includes(`-- @hook ${hook}\n`)).map((file) => `${file} ${hook}`);

  function expand(name: string): string {
    if (seen.has(name)) return "";
    seen.add(name);
    const [file = "", hook] = name.split(" ");
    const [main = "", ...parts] = read(file).split(/^-- @hook (\w+)\n/m);
    const text = hook ? expand(file) + (parts[parts.indexOf(hook) + 1] ?? "") : main;
    return text.replace(/^-- @(include|hooks) ([\w/ ]+)\n/gm, (_, kind: string, wanted: string) => {
      const names = kind === "include" ? [wanted] : wanted.split(" ").flatMap(sections);
      return names.map(expand).join("");
    });
  }

  return expand("core/common") + expand(existsSync(join(folder, `${script}.lua`)) ? script : `core/${script}`);
}
