// What the official JavaScript client makes of a server, as one line of JSON. Arguments: its entry file, the server's base URL.
const [, , entry, baseURL] = process.argv
const { default: OpenAI } = await import(entry)
const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 })
const messages = [{ role: 'user', content: 'héllo 😀' }]
const said = {}

const chat = await client.chat.completions.create({ model: 'scripted', messages, temperature: 0 })
said.chat = [chat.choices[0].message.content, chat.choices[0].finish_reason, chat.usage.total_tokens]

said.chatStream = []
const stream = await client.chat.completions.create({
  model: 'scripted', messages, temperature: 0, stream: true, stream_options: { include_usage: true },
})
for await (const chunk of stream) {
  if (chunk.choices.length) said.chatStream.push(chunk.choices[0].delta.content ?? '')
  else said.streamUsage = chunk.usage.total_tokens
}

const completion = await client.completions.create({ model: 'scripted', prompt: ['ab', 'cd'], temperature: 0, logprobs: 1 })
said.completions = completion.choices.map((choice) => choice.text)
said.logprobs = completion.choices[0].logprobs.tokens

const response = await client.responses.create({ model: 'scripted', input: 'héllo', temperature: 0 })
said.response = [response.output_text, response.status]
said.responseStream = []
for await (const event of client.responses.stream({ model: 'scripted', input: 'abc', temperature: 0 })) {
  if (event.type === 'response.output_text.delta') said.responseStream.push(event.delta)
}

const call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
const runner = client.chat.completions.stream({
  model: 'scripted', messages: [{ role: 'user', content: call }], temperature: 0,
  tools: [{ type: 'function', function: { name: 'add', parameters: {} } }],
})
const { message, finish_reason } = (await runner.finalChatCompletion()).choices[0]
said.calls = [message.tool_calls.flatMap(({ function: f }) => [f.name, JSON.parse(f.arguments)]), finish_reason]

said.models = (await client.models.list()).data.map((model) => model.id)
said.errors = []
for (const more of [{ temperature: 9 }, { model: 'other' }, { response_format: { type: 'no_such' } }, { deadline_ms: 100, ignore_eos: true }]) {
  try {
    await client.chat.completions.create({ model: 'scripted', messages, ...more })
  } catch (error) {
    said.errors.push([error.constructor.name, error.status, error.code, error.param, Boolean(error.requestID)])
  }
}
try {
  for await (const _ of await client.completions.create({
    model: 'scripted', prompt: 'abc', temperature: 0, stream: true, max_tokens: 2000, ignore_eos: true, deadline_ms: 100,
  })) { said.begun = true }
} catch (error) {
  said.streamError = error.code
}
console.log(JSON.stringify(said))
