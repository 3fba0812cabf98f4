{{- define "headrace.name" -}}
{{ .Values.fullnameOverride | default .Release.Name }}
{{- end }}

{{- define "headrace.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- /* Labels that select the pods of a component: they never change. */}}
{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- end }}

{{- define "headrace.metadata" -}}
name: {{ include "headrace.name" .root }}-{{ .component }}
labels:
  {{- include "headrace.labels" . | nindent 2 }}
{{- end }}

{{- define "headrace.podMetadata" -}}
labels:
  {{- include "headrace.selector" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "headrace.podSettings" -}}
automountServiceAccountToken: false
serviceAccountName: {{ .values.serviceAccountName }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "headrace.containerSettings" -}}
image: {{ include "headrace.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
resources:
  {{- toYaml .values.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* Options that all servers have. */}}
{{- define "headrace.args" -}}
- --keys=/etc/headrace/keys
- --metrics-host=0.0.0.0
- --metrics-port=9090
{{- with .values.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "headrace.volumeMounts" -}}
# The directory of `--keys`; clients are added and removed in the second Secret, without a restart.
- {name: keys, mountPath: /etc/headrace/keys, readOnly: true}
- {name: authorized, mountPath: /etc/headrace/keys/authorized_clients, readOnly: true}
- {name: scratch, mountPath: /tmp}
{{- if .values.sharedMemory }}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- with .values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "headrace.volumes" -}}
- name: keys
  secret: {secretName: {{ .root.Values.keys.serverSecret }}, defaultMode: 0440}
- name: authorized
  secret: {secretName: {{ .root.Values.keys.authorizedSecret }}, defaultMode: 0440}
- name: scratch
  emptyDir: {}
{{- with .values.sharedMemory }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- with .values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "headrace.probes" -}}
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 2
{{- end }}

{{- /* A headless Service: a name for the pods, without a load balancer. */}}
{{- define "headrace.service" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "headrace.metadata" . | nindent 2 }}
spec:
  clusterIP: None
  # A pod has a name before it is ready, so that others wait for it instead of failing to find it.
  publishNotReadyAddresses: true
  selector:
    {{- include "headrace.selector" . | nindent 4 }}
  ports:
    - {name: headrace, port: {{ .port }}, targetPort: headrace}
    - {name: metrics, port: 9090, targetPort: metrics}
{{- end }}

{{- /* Addresses of the pods of a StatefulSet in the domain of its Service. */}}
{{- define "headrace.addresses" -}}
{{- $name := printf "%s-%s" (include "headrace.name" .root) .component }}
{{- range $i := until (int .values.replicas) }}{{ if $i }}, {{ end }}"{{ $name }}-{{ $i }}.{{ $name }}:2222"{{ end }}
{{- end }}

{{- /* The StatefulSet of the tasks of one type. */}}
{{- define "headrace.task" -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  {{- include "headrace.metadata" . | nindent 2 }}
spec:
  serviceName: {{ include "headrace.name" .root }}-{{ .component }}
  replicas: {{ .values.replicas }}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "headrace.selector" . | nindent 6 }}
  template:
    metadata:
      {{- include "headrace.podMetadata" . | nindent 6 }}
    spec:
      terminationGracePeriodSeconds: 30
      {{- include "headrace.podSettings" . | nindent 6 }}
      containers:
        - name: {{ .component }}
          {{- include "headrace.containerSettings" . | nindent 10 }}
          args:
            - server
            - --type={{ .type }}
            - --index=$(POD_INDEX)
            - --host=0.0.0.0
            {{- include "headrace.args" . | nindent 12 }}
          envFrom:
            - configMapRef: {name: {{ include "headrace.name" .root }}-cluster}
          env:
            - name: POD_INDEX
              valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
            {{- with .values.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - {name: headrace, containerPort: {{ .port }}}
            - {name: metrics, containerPort: 9090}
          {{- include "headrace.probes" . | nindent 10 }}
          volumeMounts:
            {{- include "headrace.volumeMounts" . | nindent 12 }}
      volumes:
        {{- include "headrace.volumes" . | nindent 8 }}
{{- end }}
