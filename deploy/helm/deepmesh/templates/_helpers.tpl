{{/* The labels that select the pods of one service of this release, given {root, role}. */}}
{{- define "deepmesh.selector" -}}
app.kubernetes.io/name: deepmesh
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "deepmesh.metadata" -}}
name: {{ .root.Release.Name }}-{{ .role }}
labels:
  {{- include "deepmesh.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* host:port of every scheduler, as YAML. */}}
{{- define "deepmesh.schedulers" -}}
scheduler: {{ range $i := until (int .Values.scheduler.replicas) -}}
  {{ if $i }},{{ end }}{{ $.Release.Name }}-scheduler-{{ $i }}.{{ $.Release.Name }}-schedulers:8002
{{- end }}
{{- end }}

{{/* host:port of every KV store, as YAML. */}}
{{- define "deepmesh.stores" -}}
stores:
{{- range $i := until (int .Values.kvstore.replicas) }}
- {{ $.Release.Name }}-kvstore-{{ $i }}.{{ $.Release.Name }}-kvstore:8030
{{- else }} []
{{- end }}
{{- end }}

{{/* The configuration that each service gets besides `config`, as YAML. */}}
{{- define "deepmesh.config.server" -}}
server: { host: {{ .root.Values.host | quote }}, port: {{ .port }}, metrics_port: 9000, health_port: 9001, drain_seconds: {{ .drainSeconds }} }
{{- if .root.Values.security.issuer.name }}
security:
  tls: { certificate: /etc/deepmesh-tls/tls.crt, key: /etc/deepmesh-tls/tls.key, ca: /etc/deepmesh-tls/ca.crt }
{{- else }}
security: { plaintext: true }
{{- end }}
{{- end }}

{{- define "deepmesh.config.scheduler" -}}
{{ include "deepmesh.config.server" (dict "root" . "port" 8002 "drainSeconds" .Values.scheduler.drainSeconds) }}
{{ include "deepmesh.stores" . }}
pods: { deletion_costs: {{ .Values.scheduler.podDeletionCost }} }
{{- end }}

{{- define "deepmesh.config.gateway" -}}
{{ include "deepmesh.config.server" (dict "root" . "port" 8001 "drainSeconds" .Values.gateway.drainSeconds) }}
http: { host: {{ .Values.host | quote }}, port: 8000 }
{{ include "deepmesh.schedulers" . }}
models: [{ tokenizer_dir: {{ .Values.model.directory | quote }} }]
{{- if gt (int .Values.decode.gpus) 0 }}
{{- /* A lost worker starts again in 11 s (Moonlight, warm) to 98 s (DeepSeek-R1 on four GPUs): requests wait for it. */}}
dispatch: { worker_seconds: 120 }
{{- end }}
{{- end }}

{{/* The number of ranks of a worker, given its values. */}}
{{- define "deepmesh.ranks" -}}
{{ mul (max 1 (int .gpus)) (int .hosts) }}
{{- end }}

{{- define "deepmesh.config.worker" -}}
{{ include "deepmesh.config.server" (dict "root" .root "port" .port "drainSeconds" .values.drainSeconds) }}
{{ include "deepmesh.schedulers" .root }}
{{ include "deepmesh.stores" .root }}
engine:
  model_dir: {{ .root.Values.model.directory | quote }}
  device: {{ if gt (int .values.gpus) 0 }}cuda{{ else }}cpu{{ end }}
  transfer: {}
  {{- $ranks := include "deepmesh.ranks" .values | int }}
  {{- if gt $ranks 1 }}
  parallel: { ranks: {{ $ranks }}, hosts: {{ .values.hosts }} }
  {{- end }}
{{- end }}

{{- define "deepmesh.config.prefill" -}}
{{ include "deepmesh.config.worker" (dict "root" . "port" 8020 "values" .Values.prefill) }}
{{- end }}

{{- define "deepmesh.config.decode" -}}
{{ include "deepmesh.config.worker" (dict "root" . "port" 8010 "values" .Values.decode) }}
{{- end }}

{{- define "deepmesh.config.kvstore" -}}
{{ include "deepmesh.config.server" (dict "root" . "port" 8030 "drainSeconds" .Values.kvstore.drainSeconds) }}
{{- if .Values.redis.enabled }}
index: { redis_url: "redis://{{ .Release.Name }}-redis:6379/0" }
{{- else if .Values.redis.url }}
index:
  redis_url: {{ .Values.redis.url | quote }}
  {{- if .Values.redis.tlsSecret }}
  redis_tls: { ca: /etc/deepmesh-redis/ca.crt, certificate: /etc/deepmesh-redis/tls.crt, key: /etc/deepmesh-redis/tls.key }
  {{- end }}
{{- end }}
{{- if .Values.kvstore.disk.size }}
disk: { path: /var/lib/deepmesh }
{{- end }}
{{- end }}

{{/* The whole configuration file of a service, given {root, role}. */}}
{{- define "deepmesh.config" -}}
{{- $own := include (printf "deepmesh.config.%s" .role) .root | fromYaml -}}
{{- mergeOverwrite $own (deepCopy (index .root.Values .role).config) | toYaml -}}
{{- end }}

{{/* The Secret that seals the names of streams. */}}
{{- define "deepmesh.resumeSecret" -}}
{{ .Values.gateway.resumeSecret | default (printf "%s-resume" .Release.Name) }}
{{- end }}

{{/* The Secret with which workers vouch for the blocks that stores keep. */}}
{{- define "deepmesh.kvSecret" -}}
{{ .Values.security.kvSecret | default (printf "%s-kv" .Release.Name) }}
{{- end }}

{{/* The ports that a sidecar leaves alone: it does not know UCX's protocol. */}}
{{- define "deepmesh.sidecar" -}}
{{- if eq .root.Values.serviceMesh "istio" }}
traffic.sidecar.istio.io/includeInboundPorts: {{ .inbound | quote }}
traffic.sidecar.istio.io/includeOutboundIPRanges: ""
traffic.sidecar.istio.io/includeOutboundPorts: "6379,8002,8010,8020,8030"
{{- else if eq .root.Values.serviceMesh "linkerd" }}
{{- $ucx := .root.Values.networkPolicies.ucxPorts }}
config.linkerd.io/skip-inbound-ports: "{{ $ucx.from }}-{{ $ucx.to }},9000-9001"
config.linkerd.io/skip-outbound-ports: "{{ $ucx.from }}-{{ $ucx.to }}"
{{- end }}
{{- end }}

{{/* The pods of some services, as peers of a NetworkPolicy, given {root, roles}. */}}
{{- define "deepmesh.peers" -}}
{{- range $role := .roles }}
- podSelector:
    matchLabels:
      {{- include "deepmesh.selector" (dict "root" $.root "role" $role) | nindent 6 }}
{{- end }}
{{- end }}

{{/* DNS names in a pod's certificate: services look for the role, and KEDA for the host that it calls. */}}
{{- define "deepmesh.names" -}}
{{ .role }}.deepmesh.internal
{{- if eq .role "scheduler" }},${POD_NAME}.{{ .root.Release.Name }}-schedulers.{{ .root.Release.Namespace }}.svc{{ end }}
{{- end }}
