{{/*
A pod of one service, given {root, role, module, ports: {name: number}, id: the configuration key of its name, group:
whether it belongs to a LeaderWorkerSet, whose leader has the worker's name}. Probes use a port of their own, since they
have no certificate: readiness fails as soon as a pod stops, liveness succeeds until its requests have ended.
*/}}
{{- define "deepmesh.pod" -}}
{{- $values := index .root.Values .role }}
{{- $gpus := int (default 0 $values.gpus) }}
{{- $preStop := int (default 0 $values.preStopSeconds) }}
{{- $worker := has .role (list "prefill" "decode") }}
{{- /* Volumes with a Secret each. Their keys config.yaml override the configuration, in this order. */}}
{{- $secrets := list }}
{{- if eq .role "gateway" }}
{{- $secrets = append $secrets (dict "volume" "resume" "secret" (include "deepmesh.resumeSecret" .root)) }}
{{- end }}
{{- if $worker }}
{{- $secrets = append $secrets (dict "volume" "kv" "secret" (include "deepmesh.kvSecret" .root)) }}
{{- end }}
{{- with $values.configSecret }}
{{- $secrets = append $secrets (dict "volume" "secret" "secret" .) }}
{{- end }}
{{- $store := eq .role "kvstore" }}
{{- $redisTls := and $store (not .root.Values.redis.enabled) .root.Values.redis.tlsSecret }}
{{- $disk := and $store .root.Values.kvstore.disk.size }}
{{- $model := and (has .role (list "gateway" "prefill" "decode")) .root.Values.model.volume }}
metadata:
  labels:
    {{- include "deepmesh.selector" . | nindent 4 }}
  annotations:
    # A changed configuration starts new pods.
    checksum/config: {{ include "deepmesh.config" . | sha256sum }}
    kubectl.kubernetes.io/default-container: {{ .role }}
    {{- with include "deepmesh.sidecar" (dict "root" .root "inbound" (values .ports | sortAlpha | join ",")) }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- if and (eq .role "scheduler") .root.Values.scheduler.podDeletionCost }}
  serviceAccountName: {{ .root.Release.Name }}-scheduler
  automountServiceAccountToken: true
  {{- else }}
  automountServiceAccountToken: false
  {{- end }}
  enableServiceLinks: false
  # Seconds that a stopping pod may need: the pause before it stops, the drain of its requests, and 15 to end.
  terminationGracePeriodSeconds: {{ add $preStop (int $values.drainSeconds) 15 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: { type: RuntimeDefault }
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- if $values.topologySpreadConstraints }}
    {{- toYaml $values.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    {{- $selector := include "deepmesh.selector" . }}
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- $selector | nindent 10 }}
    {{- end }}
    {{- end }}
  containers:
    - name: {{ .role }}
      image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}"
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args:
        - {{ .module }}
        - --config=/etc/deepmesh/config.yaml
        {{- range $secrets }}
        - --config=/etc/deepmesh-{{ .volume }}/config.yaml
        {{- end }}
        # Other pods reach this one by its address, because DNS does not know its name.
        - --set=server.advertise=$(POD_IP):{{ .ports.grpc }}
        {{- with .id }}
        # The certificate names the pod. Its service must have the same name, or that of its group's leader.
        - --set={{ . }}=$({{ if $.group }}LEADER_NAME{{ else }}POD_NAME{{ end }})
        {{- end }}
      env:
        - name: POD_IP
          valueFrom: { fieldRef: { fieldPath: status.podIP } }
        - name: POD_NAME
          valueFrom: { fieldRef: { fieldPath: metadata.name } }
        {{- if .group }}
        - name: GROUP_INDEX
          valueFrom: { fieldRef: { fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']" } }
        - name: LEADER_NAME
          value: {{ .root.Release.Name }}-{{ .role }}-$(GROUP_INDEX)
        {{- end }}
      ports:
        {{- range $name, $port := .ports }}
        - { name: {{ $name }}, containerPort: {{ $port }} }
        {{- end }}
        - { name: metrics, containerPort: 9000 }
        - { name: health, containerPort: 9001 }
      startupProbe:
        grpc: { port: 9001, service: liveness }
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: {{ div (add (int (default 120 $values.startupSeconds)) 1) 2 }}
      readinessProbe:
        grpc: { port: 9001, service: readiness }
        periodSeconds: 2
        timeoutSeconds: 5
        failureThreshold: 2
      livenessProbe:
        grpc: { port: 9001, service: liveness }
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      {{- if $preStop }}
      lifecycle:
        # The pod leaves its Services now, but load balancers learn of that a little later.
        preStop: { sleep: { seconds: {{ $preStop }} } }
      {{- end }}
      {{- $resources := deepCopy $values.resources }}
      {{- if $gpus }}
      {{- $resources = mergeOverwrite $resources (dict "limits" (dict "nvidia.com/gpu" $gpus)) }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: { drop: [ALL] }
      volumeMounts:
        - { name: config, mountPath: /etc/deepmesh, readOnly: true }
        - { name: tmp, mountPath: /tmp }
        {{- if .root.Values.security.issuer.name }}
        - { name: certificate, mountPath: /etc/deepmesh-tls, readOnly: true }
        {{- end }}
        {{- range $secrets }}
        - { name: {{ .volume }}, mountPath: /etc/deepmesh-{{ .volume }}, readOnly: true }
        {{- end }}
        {{- if $redisTls }}
        - { name: redis, mountPath: /etc/deepmesh-redis, readOnly: true }
        {{- end }}
        {{- if $disk }}
        - { name: disk, mountPath: /var/lib/deepmesh }
        {{- end }}
        {{- if $model }}
        - { name: models, mountPath: /models, readOnly: true }
        {{- end }}
        {{- if $worker }}
        - { name: cache, mountPath: /var/cache/deepmesh }
        - { name: shared-memory, mountPath: /dev/shm }
        {{- end }}
  volumes:
    - name: config
      configMap: { name: {{ .root.Release.Name }}-{{ .role }} }
    - name: tmp
      emptyDir: { sizeLimit: 1Gi }
    {{- $role := .role }}
    {{- $root := .root }}
    {{- with .root.Values.security.issuer }}
    {{- if .name }}
    # cert-manager's CSI driver makes this certificate for the pod, and renews it while the pod lives.
    - name: certificate
      csi:
        driver: csi.cert-manager.io
        readOnly: true
        volumeAttributes:
          csi.cert-manager.io/issuer-name: {{ .name | quote }}
          csi.cert-manager.io/issuer-kind: {{ .kind | quote }}
          csi.cert-manager.io/issuer-group: {{ .group | quote }}
          csi.cert-manager.io/uri-sans: "spiffe://deepmesh/{{ $role }}/${POD_NAME}"
          csi.cert-manager.io/dns-names: {{ include "deepmesh.names" (dict "root" $root "role" $role) }}
          csi.cert-manager.io/key-usages: digital signature,key encipherment,server auth,client auth
          csi.cert-manager.io/fs-group: "10001"
    {{- end }}
    {{- end }}
    {{- range $secrets }}
    - name: {{ .volume }}
      secret: { secretName: {{ .secret }}, defaultMode: 0440 }
    {{- end }}
    {{- if $redisTls }}
    - name: redis
      secret: { secretName: {{ $redisTls }}, defaultMode: 0440 }
    {{- end }}
    {{- if $model }}
    - name: models
      {{- toYaml $model | nindent 6 }}
    {{- end }}
    {{- if $worker }}
    - name: cache
      {{- toYaml ($values.cacheVolume | default (dict "emptyDir" dict)) | nindent 6 }}
    - name: shared-memory
      emptyDir: { medium: Memory, sizeLimit: {{ $values.sharedMemory }} }
    {{- end }}
{{- end }}
