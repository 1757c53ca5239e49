// Verifies the events in EVENTS, [[body, headers]], as openai's Node client does.
import OpenAI from "openai";

const { OPENAI_KEY = "none", EVENTS, SECRET } = process.env;
const client = new OpenAI({ apiKey: OPENAI_KEY, webhookSecret: SECRET });
for (const [body, headers] of JSON.parse(EVENTS)) {
  const event = await client.webhooks.unwrap(body, headers);
  console.log(`${event.type} ${event.data.id}`);
  const forged = await client.webhooks.unwrap(body.replace("evt_", "evt-"), headers).catch((error) => error);
  if (!(forged instanceof OpenAI.InvalidWebhookSignatureError)) throw new Error("a forged event was accepted");
}
